"""Tiny models with random weights or a hand-written sink, and a tokenizer, built in memory: nothing is downloaded.

In a Llama of a few layers, the BOS token drives one gate/up neuron, which writes one residual dimension. After the
norm, hardly anything else is left of the token. W_K reads this dimension and W_Q reads a component that every token
shares. The head's slowest rotary pair carries their product nearly unrotated, so every later head attends to BOS.
"""

from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

VOCAB_SIZE = 300
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
"""Ids of the special tokens."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": None,
}


def build_random_model(config: Any, *, seed: int, noise: float) -> PreTrainedModel:
    """Build a model of ``config``, drawn with ``seed``; biases and gains get normal noise of deviation ``noise``."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # torch.manual_seed would reseed the GPUs of the caller too
        torch.default_generator.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1 or name.endswith("bias"):
                    parameter.add_(torch.randn(parameter.shape, dtype=torch.float32) * noise)
            for name, buffer in model.named_buffers():
                if name.endswith("layer_scalar"):  # Gemma 4's, which a checkpoint has
                    buffer.mul_(torch.rand(1, dtype=torch.float32) * 0.5 + 0.5)
    return model


_MERGES = (  # noqa: SIM905 - a list would take a page
    "Ġ t|h e|i n|a n|r e|Ġt he|e r|o n|Ġ a|a t|e n|Ġ s|o r|i s|Ġ w|Ġ o|e s|i t|o u|in g|Ġ b|Ġ h|e d|Ġ f|a r|"
    "Ġ c|an d|Ġ m|a l|Ġo f|Ġ p|l e|Ġ l|Ġ d|i c|Ġt o|Ġ n|Ġ in|s t|a s|Ġ and"
).split("|")
"""The BPE merges in order; `Ġ` is a space. 41 merges, 256 bytes and 3 special tokens make 300 ids."""


def tiny_tokenizer(*, adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """Build a byte-level tokenizer of 300 ids in memory. Any text round-trips, and every id has an entry.

    The special tokens are `<pad>` 0, `<s>` 1 and `</s>` 2. With ``adds_bos``, `<s>` comes before every encoded text, as
    in Llama's.
    """
    special = ["<pad>", "<s>", "</s>"]
    merges = [(left, right) for left, right in (merge.split() for merge in _MERGES)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = special + alphabet + [left + right for left, right in merges]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS_ID)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedTruth:
    """A model together with the sink that was written into it."""

    model: PreTrainedModel
    """A Llama of 5 layers, float32, eval mode; without the sink if it was built with `sink=False`."""
    bos_id: int
    """The token that drives the planted neuron."""
    outlier_dimension: int
    """The residual dimension that the neuron writes and every later W_K reads."""
    layer: int
    """The layer of the neuron; the heads of all later layers attend to the token."""
    neuron: int
    """The neuron's index in that layer's MLP."""


def planted(*, seed: int = 0, sink: bool = True) -> PlantedTruth:
    """Make a small Llama with a hand-written sink at BOS, or the same model without the neuron that makes the sink.

    The seed decides the indices of neuron and dimension and the sign of the outlier. BOS is the sink at any position.
    With `sink=False` the neuron keeps its random weights and all other weights are bit-identical.
    """
    fields = SIZES | dict[str, Any](
        num_hidden_layers=5,
        num_key_value_heads=2,
        intermediate_size=80,
        initializer_range=0.1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    model: Any = build_random_model(LlamaConfig(**fields), seed=seed, noise=0.02)

    places = torch.Generator().manual_seed(seed)
    shared, trigger, outlier = torch.randperm(48, generator=places)[:3].tolist()
    layer = int(torch.randint(1, 3, (), generator=places))
    neuron = int(torch.randint(80, (), generator=places))
    sign = 1.0 if torch.rand((), generator=places) < 0.5 else -1.0

    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding.mul_(3.0)  # ordinary tokens: norm about 2
        embedding[:, [shared, trigger, outlier]] *= 0.03
        embedding[:, shared] += 1.0
        embedding[BOS_ID, trigger] += 2.0  # norm about 3: BOS is not large by itself
        for block in model.model.layers:
            for writer in (block.self_attn.o_proj, block.mlp.down_proj):
                writer.weight[[shared, trigger, outlier]] *= 0.03
            attention, head_size = block.self_attn, block.self_attn.head_dim
            w_q, w_k = attention.q_proj.weight.mul_(0.3), attention.k_proj.weight.mul_(0.3)
            slowest = head_size // 2 - 1  # pair (5, 11) turns by 1e-5 a position at theta 1e6
            w_q[slowest::head_size, shared] = 2.5
            w_k[:, trigger] = 0.0  # heads recognise BOS only by the outlier
            w_k[slowest::head_size, outlier] = 2.0 * sign
            attention.v_proj.weight[:, outlier] = 0.0  # the sink's value stays small
        if sink:
            mlp = model.model.layers[layer].mlp
            for reader in (mlp.gate_proj, mlp.up_proj):
                reader.weight[neuron] = 0.0
                reader.weight[neuron, trigger] = 2.0
            mlp.down_proj.weight[:, neuron] = 0.0
            mlp.down_proj.weight[outlier, neuron] = 6.0 * sign
    return PlantedTruth(
        model=model, bos_id=BOS_ID, outlier_dimension=outlier, layer=layer, neuron=neuron
    )
