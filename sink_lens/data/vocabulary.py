"""Train a vocabulary, a byte-level BPE, on the text that the model will see.

Every byte has a token. The same texts give the same vocabulary on every machine: pairs are counted, and ties go to the
smaller pair of ids.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sink_lens.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BOS, EOS = "<bos>", "<eos>"
"""The special tokens: ids 0 and 1."""
SMALLEST = 258
"""Size of the smallest vocabulary: every byte, BOS and EOS."""
_LARGEST = 1 << 20
_PIECE = 100_000
"""Number of characters counted at once; a longer document is cut at a line end."""


def train_vocabulary(texts: Iterable[str], *, vocab_size: int) -> "PreTrainedTokenizerFast":
    """Train a byte-level BPE tokenizer with BOS (id 0) and EOS (id 1) that puts BOS in front of a text itself.

    Raises:
        InputError: the size is out of range, or there is no text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    if not SMALLEST <= vocab_size <= _LARGEST:
        raise InputError(
            f"vocab_size is {vocab_size}; need {SMALLEST} (every byte, BOS, EOS) to {_LARGEST:,}."
        )
    seen = 0

    def pieces() -> Iterable[str]:
        nonlocal seen
        for text in texts:
            seen += len(text)
            start = 0
            while start < len(text):
                line = text.find("\n", start + _PIECE)
                end = len(text) if line < 0 else line
                yield text[start:end]
                start = end

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(pieces(), trainer)
    if not seen:
        raise InputError("there is no text to train a vocabulary on; need some.")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, clean_up_tokenization_spaces=False
    )
