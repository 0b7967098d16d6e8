"""`sink-lens diff` on breakages and healthy fine-tunes that none of its first rules was made on.

    python benchmarks/diff_held_out.py FILE          breakages, and fine-tunes 0 to 23
    python benchmarks/diff_held_out.py FILE --fresh  fine-tunes 24 to 59, that no rule, first or mended, was made on

Six tiny models of five families, with other seeds and other kinds of sinks than that of `diff_alarms.py`: each kind of
breakage is another one, too. Healthy fine-tunes differ in model, text, learning rate, steps, trained weights, tokenizer
and batch. The tokens that both models read are from a part of the text on which no model was trained.
"""

import copy
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from tokenizers import models, processors
from torch import Tensor

from analyses import zoo
from benchmarks.diff_alarms import TEMPLATE, Case, configured, judge, padded, plain, text_rows, tokenizer, trained
from sink_lens.data.corpora import bundled_text
from sink_lens.data.tokens import TokenBatch, from_text
from sink_lens.models.tiny import BOS_ID, EOS_ID, tiny

CHAT = "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>\n{% endfor %}"


def tokens() -> TokenBatch:
    """The tokens that both models read."""
    return from_text(bundled_text()[250_000:], tokenizer(), sequences=12, length=56)


# --- models ---------------------------------------------------------------------------------------------------------


def _written(name: str, family: str, seed: int) -> Any:
    return trained(zoo.build(name, seed=seed, family=family).model, steps=150, seed=seed, lr=3e-3, only="lm_head")


@cache
def base(name: str) -> Any:
    """A model by its family; all but gpt2 have a sink, and each another kind."""
    if name == "gpt2":
        return trained(
            tiny("gpt2", seed=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), steps=300, seed=16, lr=2e-3
        )
    kind, family, seed = {
        "olmo2": ("bos_neuron", "olmo2", 11),
        "qwen3": ("two_dimensions", "qwen3", 12),
        "llama": ("variance", "llama", 13),
        "biased llama": ("key_bias", "llama", 14),
        "gpt_oss": ("sink_logit", "gpt_oss", 15),
    }[name]
    return _written(kind, family, seed)


# --- tokenizers -------------------------------------------------------------------------------------------------------


def processed(template: str) -> Any:
    """The tokenizer with another template of special tokens around a text."""
    made = tokenizer()
    pairs = [("<s>", BOS_ID), ("</s>", EOS_ID)]
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=template, pair=None, special_tokens=[one for one in pairs if one[0] in template]
    )
    return made


def tokenizer_with(**fields: Any) -> Any:
    """The tokenizer with other attributes."""
    made = tokenizer()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def _without_merges() -> Any:
    made = tokenizer()
    made.backend_tokenizer.model = models.BPE(vocab=made.backend_tokenizer.get_vocab(), merges=[])
    return made


_NO_BOS = TEMPLATE.replace("{{ bos_token }}", "")
TOKENIZERS: dict[str, Callable[[], dict[str, Any]]] = {
    "BOS stands at the end": lambda: {"own": processed("$A <s>")},
    "EOS stands in front": lambda: {"own": processed("</s> $A")},
    "there is no BOS token": lambda: {"own": tokenizer_with(bos_token=None)},
    "merges are lost": lambda: {"own": _without_merges()},
    "template adds BOS to what the tokenizer adds": lambda: {"before": tokenizer(template=_NO_BOS)},
    "tokenizer adds BOS that the base had not": lambda: {"before": tokenizer(adds_bos=False, template=_NO_BOS)},
    "template writes another model's BOS": lambda: {
        "own": tokenizer(template=TEMPLATE.replace("{{ bos_token }}", "<bos>"))
    },
    "template puts BOS before every message": lambda: {
        "own": tokenizer(template="{% for m in messages %}{{ bos_token }}{{ m['content'] }}\n{% endfor %}")
    },
    "template puts BOS behind the first message": lambda: {
        "own": tokenizer(template="{% for m in messages %}{{ m['content'] }}{{ bos_token }}\n{% endfor %}")
    },
}
"""Breakage -> the tokenizers of the two models, where they are not the usual one."""


# --- batches ----------------------------------------------------------------------------------------------------------


def _bos_masked() -> dict[str, Tensor]:
    ids = text_rows()
    mask = (ids != BOS_ID).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _one_lacks_bos() -> dict[str, Tensor]:
    ids = text_rows()
    ids[2] = torch.cat([ids[2, 1:], ids[1, 5:6]])
    return plain(ids)


def _packed_by_eos(*, mask: bool) -> dict[str, Tensor]:
    """Three documents a sequence, with EOS between them and one BOS in front of all."""
    ids = text_rows()
    ids[:, [9, 16]] = EOS_ID
    batch = plain(ids)
    if mask:
        document = (ids == EOS_ID).long().cumsum(1) - (ids == EOS_ID).long()
        sees = (document[:, :, None] == document[:, None]).tril()
        batch["attention_mask"] = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)[:, None]
    return batch


def _prompt_masked() -> dict[str, Tensor]:
    """A prompt of ten tokens whose labels are left out; padded on the right with EOS."""
    batch = padded(left=False)
    batch["labels"][:, :10] = -100
    return batch | {"input_ids": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, EOS_ID)}


def _inverted() -> dict[str, Tensor]:
    batch = padded(left=False)
    return batch | {"attention_mask": 1 - batch["attention_mask"]}


BATCHES: dict[str, tuple[str, Callable[[], dict[str, Tensor]]]] = {
    "BOS is masked": ("olmo2", _bos_masked),
    "one sequence in four lacks BOS": ("qwen3", _one_lacks_bos),
    "packing by EOS leaks": ("gpt2", lambda: _packed_by_eos(mask=False)),
    "left padding moves learned positions": ("gpt2", lambda: padded(left=True)),
    "the mask is inverted": ("llama", _inverted),
    "every position is 0": ("llama", lambda: plain(text_rows()) | {"position_ids": torch.zeros(4, 24).long()}),
    "left padding is seen through a mask of ones": (
        "gpt_oss",
        lambda: padded(left=True) | {"attention_mask": torch.ones(4, 24).long()},
    ),
}
"""Breakage -> the model, and the batch of its training."""


# --- configurations and weights ---------------------------------------------------------------------------------------


def weights(change: Callable[[Any], object]) -> Callable[[Any], Any]:
    """Change a copy of a model in place."""

    def changed(model: Any) -> Any:
        other = copy.deepcopy(model)
        with torch.no_grad():
            change(other)
        return other

    return changed


def each(model: Any, part: str, change: Callable[[Tensor], Any]) -> None:
    """Replace every parameter with a part in its name."""
    for name, weight in model.named_parameters():
        if part in name:
            weight.copy_(change(weight.clone()))


def _pairs(weight: Tensor) -> Tensor:
    """Rows of each head in the order of the checkpoints of Meta: rotary pairs beside each other."""
    heads = weight.view(-1, 2, 12, *weight.shape[1:])  # heads of 24
    return heads.transpose(1, 2).reshape(weight.shape)


def _swap_gate_and_up(model: Any) -> None:
    for layer in model.model.layers:
        gate, up = layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight
        kept = gate.clone()
        gate.copy_(up)
        up.copy_(kept)


def _last_layer(model: Any) -> None:
    last = model.model.layers[-1]
    last.self_attn.o_proj.weight.zero_()
    last.mlp.down_proj.weight.zero_()


def _smoothed(model: Any) -> None:
    """Gains of the outlier dimensions divided as SmoothQuant does, with weights that were not multiplied."""
    truth = zoo.build("two_dimensions", seed=12, family="qwen3").truth
    for layer in model.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            for dimensions in {*truth.outliers.values()}:
                norm.weight[list(dimensions)] /= 8


def _other_shard(model: Any) -> None:
    other = zoo.build("two_dimensions", seed=21, family="qwen3").model
    model.model.layers[2].load_state_dict(other.model.layers[2].state_dict())


def _merged(model: Any) -> Any:
    """The change of a healthy fine-tune, added with 40 times its scale."""
    other = trained(copy.deepcopy(model), steps=20, seed=31, lr=3e-4, only="self_attn", text=TEXTS["prose"]())
    with torch.no_grad():
        for mine, its in zip(model.parameters(), other.parameters(), strict=True):
            its.copy_(mine + 40 * (its - mine))
    return other


def _diverged(model: Any) -> Any:
    return trained(copy.deepcopy(model), steps=20, seed=32, lr=5e-2)


def _trained_on_noise(model: Any) -> Any:
    """Trained on text whose characters were shuffled."""
    text = bundled_text()[:60_000]
    order = torch.randperm(len(text), generator=torch.Generator().manual_seed(0)).tolist()
    return trained(copy.deepcopy(model), steps=60, seed=33, lr=3e-3, text="".join(text[at] for at in order))


def _nan(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight[3, 4] = torch.nan


MODELS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "rotary positions are scaled": (
        "biased llama",
        configured(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}),
    ),
    "scores are not scaled": ("gpt2", configured(scale_attn_weights=False)),
    "one expert instead of two": ("gpt_oss", configured(num_experts_per_tok=1)),
    "LoRA is merged with 40 times its scale": ("olmo2", _merged),
    "training diverged": ("qwen3", _diverged),
    "trained on noise": ("llama", _trained_on_noise),
    "rotary pairs are in another order": (
        "biased llama",
        weights(lambda m: [each(m, part, _pairs) for part in ("q_proj", "k_proj")]),
    ),
    "query heads are rolled by one": ("olmo2", weights(lambda m: each(m, "q_proj.weight", lambda w: w.roll(12, 0)))),
    "gate and up are swapped": ("qwen3", weights(_swap_gate_and_up)),
    "gains of the norms are lost": ("olmo2", weights(lambda m: each(m, "layernorm", torch.ones_like))),
    "biases are lost": ("gpt2", weights(lambda m: each(m, "bias", torch.zeros_like))),
    "learned positions are shifted by two": ("gpt2", weights(lambda m: each(m, "wpe", lambda w: w.roll(2, 0)))),
    "the embedding of BOS is zero": ("qwen3", weights(lambda m: m.model.embed_tokens.weight[BOS_ID].zero_())),
    "the last layer writes nothing": ("olmo2", weights(_last_layer)),
    "gains of the outliers are divided": ("qwen3", weights(_smoothed)),
    "a layer is from another checkpoint": ("qwen3", weights(_other_shard)),
    "the bias of the keys is lost": ("biased llama", weights(lambda m: each(m, "k_proj.bias", torch.zeros_like))),
    "the sink logits are lost": ("gpt_oss", weights(lambda m: each(m, "sinks", torch.zeros_like))),
    "the unembedding is the embedding": (
        "biased llama",
        weights(lambda m: m.lm_head.weight.copy_(m.model.embed_tokens.weight)),
    ),
    "a weight is not a number": ("olmo2", weights(_nan)),
}
"""Breakage -> the base, and the second model made of it."""


# --- healthy ----------------------------------------------------------------------------------------------------------


def _sums() -> str:
    """A sum after every sentence."""
    drawn = torch.randint(100, (4_000, 2), generator=torch.Generator().manual_seed(5)).tolist()
    sentences = bundled_text()[200_000:250_000].split(". ")
    return "".join(f"{told}. {a} + {b} = {a + b}\n" for told, (a, b) in zip(sentences, drawn, strict=False))


def _dialogue() -> str:
    pieces = bundled_text()[200_000:250_000].split(". ")
    turns = zip(pieces[::2], pieces[1::2], strict=False)
    return "".join(f"<|user|>{asked}</s>\n<|assistant|>{told}</s>\n" for asked, told in turns)


TEXTS: dict[str, Callable[[], str]] = {
    "prose": lambda: bundled_text()[200_000:250_000],
    "capitals": lambda: bundled_text()[200_000:250_000].upper(),
    "sums": _sums,
    "dialogue": _dialogue,
}


def more_tokens() -> Any:
    """The tokenizer with two more tokens, which its template writes."""
    made = tokenizer(template=CHAT)
    made.add_tokens(["<|user|>", "<|assistant|>"], special_tokens=True)
    return made


HEALTHY_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "the same": tokenizer,
    "padding is EOS": lambda: tokenizer_with(pad_token="</s>"),
    "another template": lambda: tokenizer(template=CHAT),
    "two more tokens": more_tokens,
    "padding on the left": lambda: tokenizer_with(padding_side="left"),
}
HEALTHY_BATCHES: dict[str, Callable[[], dict[str, Tensor] | None]] = {
    "none": lambda: None,
    "no labels": lambda: {"input_ids": text_rows()},
    "prompt without labels": _prompt_masked,
    "packed by EOS with a mask": lambda: _packed_by_eos(mask=True),
}
_BASES = ("olmo2", "qwen3", "llama", "biased llama", "gpt_oss", "gpt2")
_RATES = (1e-5, 5e-5, 2e-4, 5e-4)
_STEPS = (10, 25, 40)
_TRAINED = ("", "attn", "norm")


def healthy(seed: int) -> tuple[str, dict[str, Any]]:
    """One healthy fine-tune, and what it is in words; every part has a cycle of its own."""
    model = base(name := _BASES[seed % 6])
    text = list(TEXTS)[seed % 4]
    asked = list(HEALTHY_TOKENIZERS)[seed % 5]
    batch = list(HEALTHY_BATCHES)[(seed // 2) % 4]
    lr, steps, only = _RATES[(seed // 3) % 4], _STEPS[seed % 3], _TRAINED[(seed // 4) % 3]
    if only == "norm" and name == "gpt2":
        only = "ln_"
    own, second = HEALTHY_TOKENIZERS[asked](), copy.deepcopy(model)
    if asked == "two more tokens":
        second.resize_token_embeddings(len(own), mean_resizing=False)
    second = trained(second, steps=steps, seed=500 + seed, lr=lr, only=only, text=TEXTS[text]())
    said = (
        f"{seed}: {name}, {text}, lr {lr:g}, {steps} steps, {only or 'all'} trained, tokenizer {asked}, batch {batch}"
    )
    return said, {"first": model, "second": second, "own": own, "batch": HEALTHY_BATCHES[batch]()}


def fine_tunes(*seeds: int) -> Iterator[Case]:
    """Healthy fine-tunes."""
    for seed in seeds:
        said, given = healthy(seed)
        yield "healthy", said, given | {"tokens": tokens()}


def cases() -> Iterator[Case]:
    """Every comparison: broken or healthy, its name, and both models with tokenizers and batch."""
    shared = {"tokens": tokens()}
    for place, (name, make) in enumerate(TOKENIZERS.items()):
        model = base(_BASES[place % 6])
        yield "broken", name, {"first": model, "second": model} | make() | shared
    for name, (kind, make_batch) in BATCHES.items():
        yield "broken", name, {"first": base(kind), "second": base(kind), "batch": make_batch()} | shared
    for name, (kind, change) in MODELS.items():
        yield "broken", name, {"first": base(kind), "second": change(base(kind))} | shared
    yield from fine_tunes(*range(24))


if __name__ == "__main__":
    judge(fine_tunes(*range(24, 60)) if "--fresh" in sys.argv else cases(), sys.argv[1])
