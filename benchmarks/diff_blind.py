"""`sink-lens diff` on a second set, written and committed before its author had read a rule or a result of `diff`.

    python benchmarks/diff_blind.py FILE

No breakage is in `diff_alarms.py` or `diff_held_out.py`. Each is one that people have made, and it changes what the
second model computes, reads or learns: the line above it says how. As in life it is planted into a fine-tune rather
than into a copy of the base. The 24 healthy fine-tunes differ in how they were trained, saved, resized and rounded.
Twelve of the 15 families are in neither of the other sets, and no model is. The tokens that both models read are from a
part of the text on which no model was trained.

A change of a model is a breakage if it costs at least 0.01 nats on these tokens beside the same fine-tune without it,
or if it is read where they do not show it (rows of new tokens). By this, three were left out before any was judged, as
their models hardly used what was lost: the soft cap of gemma2's scores, the normalisation of qwen3_moe's experts, and
smollm3's layer without positions.
"""

import copy
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from tokenizers import models, normalizers, pre_tokenizers
from torch import Tensor
from torch.nn.utils import parametrize

from analyses import zoo
from benchmarks.diff_alarms import (
    TEMPLATE,
    Case,
    configured,
    judge,
    packed,
    padded,
    plain,
    text_rows,
    tokenizer,
    trained,
)
from benchmarks.diff_held_out import CHAT, TEXTS, each, more_tokens, processed, tokenizer_with, weights
from sink_lens.data.corpora import bundled_text
from sink_lens.data.tokens import TokenBatch, from_text
from sink_lens.models.tiny import BOS_ID, EOS_ID, PAD_ID, tiny

Given = dict[str, Any]


def tokens(*, bos: bool = True) -> TokenBatch:
    """The tokens that both models read."""
    return from_text(bundled_text()[275_000:], tokenizer(adds_bos=bos), sequences=14, length=60)


# --- models -----------------------------------------------------------------------------------------------------------

_WRITTEN = {
    "embedding llama": ("embedding", "llama", 41),
    "slow olmo2": ("slow_growth", "olmo2", 42),
    "direction qwen3": ("direction", "qwen3", 43),
    "redundant llama": ("redundant", "llama", 44),
}
"""Name -> kind, family and seed of a model with a sink, of kinds that the other sets do not have."""
_FAMILIES = (
    *("gpt_neox", "gemma2", "gemma3", "granite", "cohere", "smollm3"),
    *("qwen3_moe", "gpt_neo", "opt", "phi3", "mistral"),
)
_TRAINED = {family: 51 + place for place, family in enumerate(_FAMILIES)}
"""Family -> seed of a random model that is trained on text."""


def _pretrained(family: str, *, seed: int, **options: Any) -> Any:
    fields = {"dropout": 0.0} if family == "opt" else {}
    return trained(tiny(family, seed=seed, **fields), steps=600, seed=seed, lr=2e-3, **options)


@cache
def base(name: str) -> Any:
    """A model by its name; that of `qwen2` is trained and read without BOS, as Qwen's are."""
    if name in _WRITTEN:
        kind, family, seed = _WRITTEN[name]
        model = zoo.build(kind, seed=seed, family=family).model
        return trained(model, steps=150, seed=seed, lr=3e-3, only="lm_head")
    if name == "qwen2":
        return _pretrained("qwen2", seed=70, read=_without_bos)
    return _pretrained(name, seed=_TRAINED[name])


@cache
def tuned(name: str) -> Any:
    """A healthy fine-tune of a base, into which a breakage is planted."""
    return trained(copy.deepcopy(base(name)), steps=20, seed=700, lr=2e-4, text=TEXTS["prose"]())


# --- how a model is changed -------------------------------------------------------------------------------------------


def _tiled_heads(model: Any) -> Any:
    """One key-value head a query head, in the order 0 1 0 1 rather than 0 0 1 1."""
    heads, grouped = model.config.num_attention_heads, model.config.num_key_value_heads
    state = {
        name: weight.view(grouped, -1, weight.shape[1]).repeat(heads // grouped, 1, 1).flatten(0, 1)
        if "k_proj" in name or "v_proj" in name
        else weight
        for name, weight in model.state_dict().items()
    }
    config = copy.deepcopy(model.config)
    config.num_key_value_heads = heads
    other = type(model)(config).eval()
    other.load_state_dict(state)
    return other


def _other_layout(weight: Tensor) -> Tensor:
    """Rows of a fused matrix that is stored by head, in the order of one that is stored by query, key and value."""
    return weight.view(4, 3, -1, *weight.shape[1:]).transpose(0, 1).reshape(weight.shape)


class _LowRank(torch.nn.Module):
    """A weight plus the product of two matrices of rank 2."""

    def __init__(self, weight: Tensor, *, generator: torch.Generator) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.down = torch.nn.Parameter(torch.randn(2, columns, generator=generator) / columns**0.5)
        self.up = torch.nn.Parameter(torch.zeros(rows, 2))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


def _adapted(model: Any, *, seed: int, steps: int = 60, lr: float = 3e-3) -> Any:
    """A fine-tune of every linear layer by LoRA, merged."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    linear = [
        part for name, part in other.named_modules() if isinstance(part, torch.nn.Linear) and "lm_head" not in name
    ]
    for part in linear:
        parametrize.register_parametrization(part, "weight", _LowRank(part.weight, generator=generator))
    trained(other, steps=steps, seed=seed, lr=lr, only="weight.0.", text=TEXTS["prose"]())
    for part in linear:
        parametrize.remove_parametrizations(part, "weight")
    return other


def _between(first: Any, second: Any, factor: float) -> Any:
    """The first model, and a factor times its difference from the second."""
    other = copy.deepcopy(first)
    with torch.no_grad():
        for mine, its in zip(other.parameters(), second.parameters(), strict=True):
            mine.add_(factor * (its - mine))
    return other


def _lora(name: str, *, seed: int, factor: float) -> Any:
    return _between(base(name), _adapted(base(name), seed=seed), factor)


def _matrices(change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """Change every matrix of every layer."""
    return weights(lambda model: each(model, "layers", lambda weight: change(weight) if weight.ndim == 2 else weight))


def _zero_off_by_one(weight: Tensor) -> Tensor:
    """Rounded to 4 bits in groups of 16, and read with a zero point that is one too low."""
    groups = weight.view(-1, 16)
    low = groups.amin(1, keepdim=True)
    step = (groups.amax(1, keepdim=True) - low) / 15
    return (low + ((groups - low) / step).round() * step + step).view(weight.shape)


def _int8(weight: Tensor, *, other_row: int = 0) -> Tensor:
    """Rounded to 8 bits with a scale for each row; read with the scale of another row."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round() * scale.roll(other_row, 0)


def _fresh_layer(model: Any) -> None:
    """Layer 1 as Hugging Face initialises what a file lacks."""
    generator = torch.Generator().manual_seed(8)
    for weight in model.model.layers[1].parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator) * 0.02 if weight.ndim == 2 else 1.0)


def _fresh_unembedding(model: Any) -> None:
    weight = model.lm_head.weight
    weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(9)) * 0.02)


def _without_last_layer(model: Any) -> Any:
    config = copy.deepcopy(model.config)
    config.num_hidden_layers -= 1
    other = type(model)(config).eval()
    other.load_state_dict(model.state_dict(), strict=False)
    return other


def _resized(model: Any, n: int, *, noise: float | None = None) -> Any:
    """With `n` rows; new ones have their mean and spread if `noise` is None, else normal noise of that size."""
    other = copy.deepcopy(model)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(10)
        other.resize_token_embeddings(n, mean_resizing=noise is None)
        if noise is not None:
            for table in (other.get_input_embeddings(), other.get_output_embeddings()):
                table.weight[300:] = torch.randn(table.weight[300:].shape) * noise
    return other


def _next_expert(experts: Tensor) -> Tensor:
    return experts.roll(1, 0)


def _shifted_twice(ids: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids, "labels": torch.cat([ids[:, 1:], torch.full((len(ids), 1), -100)], dim=1)}


def _without_bos(ids: Tensor) -> dict[str, Tensor]:
    return plain(ids[:, 1:])


# --- tokenizers -------------------------------------------------------------------------------------------------------


def _one_higher() -> Any:
    """Every id but those of the special tokens is one higher; the last is the first."""
    made = tokenizer(adds_bos=False)
    parts = made.backend_tokenizer
    vocabulary = {word: at if at < 3 else 3 + (at - 2) % 297 for word, at in parts.get_vocab().items()}
    merges = [tuple(pair) for pair in json.loads(parts.to_str())["model"]["merges"]]
    own = processed("<s> $A")
    own.backend_tokenizer.model = models.BPE(vocab=vocabulary, merges=merges)
    return own


def _lower() -> Any:
    made = tokenizer()
    made.backend_tokenizer.normalizer = normalizers.Lowercase()
    return made


def _space_in_front() -> Any:
    made = tokenizer()
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return made


def _pad_beyond() -> Any:
    made = tokenizer()
    made.add_special_tokens({"pad_token": "[PAD]"})
    return made


_ASKS = TEMPLATE + "{% if add_generation_prompt %}assistant: {% endif %}"

# --- batches ----------------------------------------------------------------------------------------------------------


def _late_restarts() -> Given:
    positions = torch.cat([torch.arange(13), torch.arange(11)]).expand(4, -1).contiguous()
    return packed() | {"position_ids": positions}


def _counted_documents() -> Given:
    return packed(restarts=True) | {"attention_mask": (1 + torch.arange(24) // 12).expand(4, -1).contiguous()}


def _float_mask() -> Given:
    batch = packed(restarts=True, mask=True)
    return batch | {"attention_mask": batch["attention_mask"].float()}


def _answers(*, end: bool) -> Given:
    """Sequences that end in EOS and are padded with EOS; `end`: the first EOS has a label."""
    ids, lengths = text_rows(), torch.tensor([[23], [20], [17], [15]])
    ids = ids.masked_fill(torch.arange(24) >= lengths, EOS_ID)
    mask = (torch.arange(24) <= lengths).long()
    left_out = mask == 0 if end else ids == EOS_ID
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(left_out, -100)}


def _padded_between() -> Given:
    ids = text_rows()
    ids[:, 9:14] = PAD_ID
    return plain(ids) | {"labels": ids.masked_fill(ids == PAD_ID, -100), "attention_mask": torch.ones(4, 24).long()}


def _negative_ids() -> Given:
    batch = padded(left=False)
    return batch | {"input_ids": batch["labels"]}


def _shifted_mask() -> Given:
    batch = padded(left=True)
    return batch | {"attention_mask": torch.cat([batch["attention_mask"][:, 1:], torch.zeros(4, 1).long()], dim=1)}


# --- what people break ------------------------------------------------------------------------------------------------


def _own(make: Callable[[], Any], **before: Callable[[], Any]) -> Callable[[Any], Given]:
    return lambda model: {"own": make()} | {name: made() for name, made in before.items()}


def _batch(make: Callable[[], Given]) -> Callable[[Any], Given]:
    return lambda model: {"batch": make()}


def _model(change: Callable[[Any], Any]) -> Callable[[Any], Given]:
    return lambda model: {"second": change(model)}


BREAKAGES: dict[str, tuple[str, Callable[[Any], Given]]] = {
    # add_eos_token of training left on: every prompt ends a document, and the model begins another
    "tokenizer adds EOS at the end": ("embedding llama", _own(lambda: processed("<s> $A </s>"))),
    # the template's BOS becomes the characters < s >, as where a converter does not parse special tokens
    "special tokens are read as characters": ("slow olmo2", _own(lambda: tokenizer_with(split_special_tokens=True))),
    # the tuned model is never shown where a turn ends, and its answers do not stop
    "template lost the end of a turn": (
        "mistral",
        _own(lambda: tokenizer(template=CHAT.replace("</s>", "")), before=lambda: tokenizer(template=CHAT)),
    ),
    # ShareGPT's `value` for `content`: every message is empty
    "template reads another key": ("phi3", _own(lambda: tokenizer(template=TEMPLATE.replace("content", "value")))),
    # earlier turns and the system prompt are not read
    "template shows only the last message": (
        "smollm3",
        _own(lambda: tokenizer(template=TEMPLATE.replace("in messages", "in messages[-1:]"))),
    ),
    # add_generation_prompt does nothing: the model goes on in the user's words
    "template ignores the generation prompt": (
        "granite",
        _own(tokenizer, before=lambda: tokenizer(template=_ASKS)),
    ),
    # [PAD] was added without resizing: id 300 of 300 rows
    "padding is beyond the embedding": ("gemma2", _own(_pad_beyond)),
    # a tokenizer of another release: each word has the id of its neighbour
    "every id is one higher": ("qwen3_moe", _own(_one_higher)),
    # a normaliser of another tokenizer: capitals are lost
    "text is lower-cased": ("gpt_neox", _own(_lower)),
    # the prefix space of the slow tokenizer: the first word is another token
    "a space is put in front": ("redundant llama", _own(_space_in_front)),
    # whoever masks labels where ids are padding never trains a full stop
    "padding is the full stop": ("gemma3", _own(lambda: tokenizer_with(pad_token="."))),
    # a collator of RoBERTa: learned positions 2 to 25 for 0 to 23
    "learned positions begin at two": (
        "gpt_neo",
        _batch(lambda: plain(text_rows()) | {"position_ids": torch.arange(2, 26).expand(4, -1).contiguous()}),
    ),
    # the second document's BOS belongs to the first, and the second has none
    "positions restart a token late": ("embedding llama", _batch(_late_restarts)),
    # 1 1 2 2 of a packing trainer: other kernels read any number as true, and documents see each other
    "the mask counts documents": ("mistral", _batch(_counted_documents)),
    # the response template was not found: there is nothing to learn
    "no label is left": (
        "qwen3_moe",
        _batch(lambda: plain(text_rows()) | {"labels": torch.full((4, 24), -100)}),
    ),
    # padding is EOS, so the end of the answer has no label: the model never learns to stop
    "labels of EOS are left out": ("granite", _batch(lambda: _answers(end=False))),
    # a 4-D mask without the triangle: every token sees the next one
    "the mask shows later tokens": (
        "cohere",
        _batch(lambda: plain(text_rows()) | {"attention_mask": torch.ones(4, 1, 24, 24).bool()}),
    ),
    # ones and zeros are added to the scores, and hide nothing
    "a mask of ones and zeros is added": ("phi3", _batch(_float_mask)),
    # the prompt was padded before the answer was put behind it
    "padding between prompt and answer is seen": ("slow olmo2", _batch(_padded_between)),
    # ids and labels share a tensor, which was masked
    "-100 stands among the ids": ("smollm3", _batch(_negative_ids)),
    # off by one: a padding token is seen, and the last token is not
    "the mask is shifted by a token": ("redundant llama", _batch(_shifted_mask)),
    # partial_rotary_factor is read as 1: positions turn dimensions that had none
    "rotary fraction is lost": (
        "gpt_neox",
        _model(
            configured(
                rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
            )
        ),
    ),
    # GPT-NeoX's residual order set for GPT-J's or the other way round
    "residuals are in a row": ("gpt_neox", _model(configured(use_parallel_residual=False))),
    # sliding_window: null in a converted configuration
    "the window is lost": ("mistral", _model(configured(sliding_window=None))),
    # layers with and without a window changed places
    "kinds of attention are exchanged": (
        "gemma3",
        _model(configured(layer_types=["full_attention", "sliding_attention", "full_attention"])),
    ),
    # a converter that knows no attention_multiplier: the root of the head's width
    "scores are scaled by the head's width": ("granite", _model(configured(attention_multiplier=12**-0.5))),
    # a converter that knows no final_logit_softcapping
    "soft cap of the logits is lost": ("gemma2", _model(configured(final_logit_softcapping=None))),
    # a converter that knows no embedding_multiplier
    "embeddings are not multiplied": ("granite", _model(configured(embedding_multiplier=1.0))),
    # a converter that knows no logit_scale
    "logits are not scaled": ("cohere", _model(configured(logit_scale=1.0))),
    # repeat where repeat_interleave was needed: queries read another group's keys
    "key-value heads are tiled": ("mistral", _model(_tiled_heads)),
    # a fused matrix is split by query, key and value although it is stored by head
    "fused queries, keys and values are split wrongly": (
        "gpt_neox",
        _model(weights(lambda m: each(m, "query_key_value", _other_layout))),
    ),
    # lm_head.weight was missing in the file
    "the unembedding is newly initialised": ("redundant llama", _model(weights(_fresh_unembedding))),
    # a merged checkpoint was loaded as the base of its own adapter
    "LoRA is merged twice": ("phi3", lambda m: {"second": _lora("phi3", seed=81, factor=2.0)}),
    # unmerge was called on a base that had no adapter
    "LoRA is subtracted": ("mistral", lambda m: {"second": _lora("mistral", seed=82, factor=-1.0)}),
    # GPTQ's zero points are stored one too low, and one was not added
    "4-bit zero points are off by one": ("slow olmo2", _model(_matrices(_zero_off_by_one))),
    # scales of rows are read one row too late
    "8-bit scales belong to the next row": ("direction qwen3", _model(_matrices(lambda w: _int8(w, other_row=1)))),
    # a shard lacks a layer, which is newly initialised with a warning
    "a layer is newly initialised": ("embedding llama", _model(weights(_fresh_layer))),
    # the file was not written to its end
    "half of a matrix is zero": (
        "redundant llama",
        _model(weights(lambda m: m.model.layers[1].mlp.up_proj.weight[m.config.intermediate_size // 2 :].zero_())),
    ),
    # num_hidden_layers is one too low, and the last layer of the file is unused
    "the last layer is left out": ("granite", _model(_without_last_layer)),
    # the template writes tokens whose rows nobody initialised
    "new tokens have rows of zeros": (
        "embedding llama",
        lambda m: {"second": _resized(m, 302, noise=0.0), "own": more_tokens()},
    ),
    # padding of the vocabulary was left as it was in memory, and takes probability
    "padding rows of the vocabulary are noise": ("direction qwen3", lambda m: {"second": _resized(m, 320, noise=1.0)}),
    # (in, out) for (out, in), which a square matrix does not show
    "a square matrix is transposed": ("opt", _model(weights(lambda m: each(m, "out_proj.weight", lambda w: w.T)))),
    # a converter that knows no QK-norm: gains of Gemma are 1 + weight
    "gains of queries and keys are lost": (
        "gemma3",
        _model(weights(lambda m: [each(m, part, torch.zeros_like) for part in ("q_norm", "k_norm")])),
    ),
    # Gemma's norm multiplies by 1 + weight, and the file already holds 1 + weight
    "one is added to the gains twice": ("gemma2", _model(weights(lambda m: each(m, "norm.weight", lambda w: w + 1)))),
    # experts were sorted by name, and their router was not
    "experts are in another order": (
        "qwen3_moe",
        _model(weights(lambda m: [each(m, part, _next_expert) for part in ("gate_up_proj", "experts.down_proj")])),
    ),
    # a merge of two models that share no pretraining
    "mean of two unrelated models": (
        "mistral",
        lambda m: {"second": _between(m, _pretrained("mistral", seed=83), 0.5)},
    ),
    # 250 steps on 800 characters: the model recites, and has forgotten the rest
    "overfitted to a page": (
        "smollm3",
        _model(lambda m: trained(copy.deepcopy(m), steps=250, seed=84, lr=3e-3, text=TEXTS["prose"]()[:800])),
    ),
    # collator and model both shift labels: the model learns the token after the next
    "trained with labels that are shifted twice": (
        "cohere",
        _model(lambda m: trained(copy.deepcopy(m), steps=60, seed=85, lr=1e-3, read=_shifted_twice)),
    ),
}
"""Breakage -> the base, and what it does to the comparison, given the base's fine-tune."""


# --- healthy ----------------------------------------------------------------------------------------------------------


def _tune(model: Any, *, seed: int, lr: float = 3e-4, steps: int = 30, **options: Any) -> Any:
    text = TEXTS[("prose", "sums", "dialogue")[seed % 3]]()
    return trained(copy.deepcopy(model), steps=steps, seed=600 + seed, lr=lr, text=text, **options)


def _saved(model: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, max_shard_size="100KB")
        return type(model).from_pretrained(folder).eval()


RECIPES: dict[str, Callable[[Any, int], Any]] = {
    "lr 1e-3": lambda m, seed: trained(copy.deepcopy(m), steps=60, seed=600 + seed, lr=1e-3, text=TEXTS["prose"]()),
    "LoRA of rank 2": lambda m, seed: _adapted(m, seed=600 + seed),
    "saved in bf16": lambda m, seed: _saved(_tune(m, seed=seed).bfloat16()).float(),
    "saved in fp16": lambda m, seed: _saved(_tune(m, seed=seed).half()).float(),
    "resumed from shards": lambda m, seed: _tune(_saved(_tune(m, seed=seed)), seed=seed + 100),
    "weight decay 0.3": lambda m, seed: _tune(m, seed=seed, decay=0.3),
    "two more tokens": lambda m, seed: _tune(_resized(m, 302), seed=seed),
    "vocabulary padded to 320": lambda m, seed: _tune(_resized(m, 320), seed=seed),
    "rounded to int8 by row": lambda m, seed: _matrices(_int8)(_tune(m, seed=seed)),
    "mean of two fine-tunes": lambda m, seed: _between(_tune(m, seed=seed), _tune(m, seed=seed + 3, steps=60), 0.5),
    "embeddings alone": lambda m, seed: _tune(m, seed=seed, only="embed", lr=1e-3),
    "no BOS before or after": lambda m, seed: _tune(m, seed=seed, read=_without_bos),
}
"""How a healthy fine-tune is made, from the base and a seed."""
_OTHERS = ("gemma2", "slow olmo2", "granite", "embedding llama", "phi3", "direction qwen3", "mistral", "smollm3")
HEALTHY_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "the same": tokenizer,
    "with a system prompt": lambda: tokenizer(template=TEMPLATE.replace("{% for", "You help.\n{% for", 1)),
    "with turns": lambda: tokenizer(template=CHAT),
    "with a generation prompt": lambda: tokenizer(template=_ASKS),
    "padded left with EOS": lambda: tokenizer_with(pad_token="</s>", padding_side="left"),
}


def _flattened() -> Given:
    """Four documents in one row, whose positions restart; the first token of each has no label."""
    ids = text_rows(4, length=12).reshape(1, -1)
    batch = {"input_ids": ids, "position_ids": torch.arange(12).repeat(4)[None]}
    return batch | {"labels": ids.masked_fill(ids == BOS_ID, -100)}


HEALTHY_BATCHES: dict[str, Callable[[], Given | None]] = {
    "none": lambda: None,
    "answers that end in EOS": lambda: _answers(end=True),
    "documents in one row": _flattened,
    "a mask of ones": lambda: plain(text_rows()) | {"attention_mask": torch.ones(4, 24).long()},
}


def healthy(seed: int) -> tuple[str, Given]:
    """One healthy fine-tune, and what it is in words; parts have cycles of their own."""
    recipe = list(RECIPES)[seed % 12]
    asked, read = list(HEALTHY_TOKENIZERS)[seed % 5], list(HEALTHY_BATCHES)[(seed // 2) % 4]
    if recipe == "no BOS before or after":
        name, asked, read = "qwen2", "without BOS", "without BOS"
        template = TEMPLATE.replace("{{ bos_token }}", "")
        bare = tokenizer(adds_bos=False, template=template)
        given: Given = {"before": bare, "own": bare, "batch": plain(text_rows()[:, 1:]), "tokens": tokens(bos=False)}
    else:
        name = _OTHERS[(seed + seed // 8) % 8]
        if recipe == "two more tokens":
            asked = "with two more tokens"
        own = more_tokens() if recipe == "two more tokens" else HEALTHY_TOKENIZERS[asked]()
        given = {"own": own, "batch": HEALTHY_BATCHES[read](), "tokens": tokens()}
    second = RECIPES[recipe](base(name), seed)
    return f"{seed}: {name}, {recipe}, tokenizer {asked}, batch {read}", given | {"first": base(name), "second": second}


def cases() -> Iterator[Case]:
    """Every comparison: broken or healthy, its name, and both models with tokenizers and batch."""
    for breakage, (name, change) in BREAKAGES.items():
        given = {"first": base(name), "second": tuned(name), "tokens": tokens()}
        yield "broken", breakage, given | change(tuned(name))
    for seed in range(24):
        yield "healthy", *healthy(seed)


if __name__ == "__main__":
    judge(cases(), sys.argv[1])
