"""How often `sink-lens diff` finds a planted breakage, and how often it alarms at a healthy fine-tune.

    python benchmarks/diff_alarms.py benchmarks/diff_alarms.csv

Thirty breakages are planted, one at a time, into tokenizers, chat templates, batches, configurations and weights of a
tiny trained model; healthy fine-tunes differ in seed, text, learning rate and in which weights they train.
"""

import copy
import csv
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from scipy.stats import binomtest
from tokenizers import processors
from torch import Tensor

from sink_lens import wrap
from sink_lens.data.corpora import bundled_text
from sink_lens.data.tokens import TokenBatch, from_text
from sink_lens.edits.quantisation import format_of, round_to
from sink_lens.errors import SinkLensError
from sink_lens.models.tiny import BOS_ID, PAD_ID, planted, tiny_tokenizer
from sink_lens.studies import diff

Case = tuple[str, str, dict[str, Any]]
SIZE = {"sequences": 8, "length": 48}
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}\n{% endfor %}"


def tokenizer(*, adds_bos: bool = True, template: str | None = TEMPLATE) -> Any:
    """The tiny tokenizer with a chat template that begins with BOS."""
    made = tiny_tokenizer(adds_bos=adds_bos)
    made.chat_template = template
    return made


def batches(seed: int, *, n: int, length: int = 48, text: str | None = None) -> Iterator[Tensor]:
    """Random pieces of a text with BOS in front; of the bundled text if None."""
    text = bundled_text()[:200_000] if text is None else text
    ids = torch.tensor(tiny_tokenizer(adds_bos=False)(text, verbose=False)["input_ids"])
    generator = torch.Generator().manual_seed(seed)
    for _ in range(n):
        starts = torch.randint(len(ids) - length, (8,), generator=generator).tolist()
        rows = torch.stack([ids[start : start + length - 1] for start in starts])
        yield torch.cat([torch.full((8, 1), BOS_ID), rows], dim=1)


def plain(ids: Tensor) -> dict[str, Tensor]:
    """A batch without padding."""
    return {"input_ids": ids, "labels": ids.clone()}


def trained(
    model: Any,
    *,
    steps: int,
    seed: int,
    lr: float,
    only: str = "",
    text: str | None = None,
    decay: float = 0.01,
    read: Callable[[Tensor], dict[str, Tensor]] = plain,
) -> Any:
    """The model after some steps of training on text; see ``batches``. ``read`` makes the input of a batch's ids."""
    chosen = [weight for name, weight in model.named_parameters() if only in name]
    optimizer = torch.optim.AdamW(chosen, lr=lr, weight_decay=decay)
    model.train()
    for ids in batches(seed, n=steps, text=text):
        optimizer.zero_grad()
        model(**read(ids)).loss.backward()
        torch.nn.utils.clip_grad_norm_(chosen, 1.0)
        optimizer.step()
    return model.eval()


def base(steps: int = 150) -> Any:
    """The model with a planted sink and an unembedding that is trained on text."""
    return trained(planted().model, steps=steps, seed=0, lr=5e-3, only="lm_head")


def tuned(seed: int, model: Any, *, steps: int = 20) -> Any:
    """A healthy fine-tune: its seed decides text, learning rate and weights."""
    only = ("", "self_attn", "mlp", "layers.4")[seed % 4]
    return trained(copy.deepcopy(model), steps=steps, seed=1000 + seed, lr=(3e-5, 1e-4, 3e-4)[seed % 3], only=only)


# --- what can break: each returns what replaces the second model's part ---------------------------------------------


def _processed(template: str) -> Any:
    made = tokenizer()
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=template, pair=None, special_tokens=[(str(made.bos_token), BOS_ID)]
    )
    return made


def _other_bos() -> Any:
    made = tokenizer()
    made.bos_token = made.eos_token
    return made


def _pad_is_bos() -> Any:
    made = tokenizer()
    made.pad_token = made.bos_token
    return made


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "tokenizer drops BOS": lambda: tokenizer(adds_bos=False),
    "tokenizer doubles BOS": lambda: _processed("<s> <s> $A"),
    "BOS is another token": _other_bos,
    "padding is BOS": _pad_is_bos,
    "template lacks BOS": lambda: tokenizer(template=TEMPLATE.replace("{{ bos_token }}", "")),
    "template doubles BOS": lambda: tokenizer(template="{{ bos_token }}" + TEMPLATE),
    "template is lost": lambda: tokenizer(template=None),
}
"""Breakage -> the second model's tokenizer."""


def text_rows(n: int = 4, *, length: int = 24) -> Tensor:
    """Sequences with BOS in front."""
    return next(batches(7, n=1, length=length))[:n]


def packed(*, restarts: bool = False, mask: bool = False, ones: bool = False) -> dict[str, Tensor]:
    """Two documents a sequence, each with its BOS."""
    half = text_rows(8, length=12)
    ids = torch.cat([half[:4], half[4:]], dim=1)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if restarts:
        batch["position_ids"] = torch.arange(12).repeat(2).expand(4, -1).contiguous()
    if ones:
        batch["attention_mask"] = torch.ones_like(ids)
    if mask:
        document = torch.arange(24) // 12
        sees = (document[:, None] == document) & (torch.arange(24)[:, None] >= torch.arange(24))
        batch["attention_mask"] = sees[None, None].expand(4, 1, 24, 24).contiguous()
    return batch


def padded(*, left: bool, mask: bool = True, labels: bool = True) -> dict[str, Tensor]:
    """Sequences of 16 to 24 tokens, padded."""
    ids, real = torch.full((4, 24), PAD_ID), torch.zeros(4, 24, dtype=torch.long)
    for row, (length, tokens) in enumerate(zip((24, 20, 18, 16), text_rows(), strict=True)):
        where = slice(24 - length, None) if left else slice(0, length)
        ids[row, where], real[row, where] = tokens[:length], 1
    batch = {"input_ids": ids, "labels": ids.masked_fill(real == 0, -100) if labels else ids.clone()}
    return batch | ({"attention_mask": real} if mask else {})


def _shifted() -> dict[str, Tensor]:
    ids = text_rows()
    return {"input_ids": ids, "labels": torch.cat([ids[:, 1:], torch.full((4, 1), -100)], dim=1)}


BATCHES: dict[str, Callable[[], dict[str, Tensor]]] = {
    "batch lacks BOS": lambda: plain(text_rows()[:, 1:]),
    "batch has BOS twice": lambda: plain(torch.cat([torch.full((4, 1), BOS_ID), text_rows()], dim=1)),
    "packing leaks": lambda: packed(),
    "packing leaks through a mask of ones": lambda: packed(restarts=True, ones=True),
    "left padding without a mask": lambda: padded(left=True, mask=False),
    "padding is trained": lambda: padded(left=False, labels=False),
    "labels are shifted": _shifted,
}
"""Breakage -> the batch of the second model's training."""
HEALTHY_BATCHES: dict[str, Callable[[], dict[str, Tensor]]] = {
    "plain": lambda: plain(text_rows()),
    "padded on the right": lambda: padded(left=False),
    "padded on the left with a mask": lambda: padded(left=True),
    "packed with a mask": lambda: packed(restarts=True, mask=True),
}
"""Batches without a fault."""


def configured(**fields: Any) -> Callable[[Any], Any]:
    """Give a copy of a model other fields of its configuration; the weights are the same."""

    def changed(model: Any) -> Any:
        config = copy.deepcopy(model.config)
        for name, value in fields.items():
            setattr(config, name, value)
        other = type(model)(config).eval()
        other.load_state_dict(model.state_dict())
        return other

    return changed


def _weights(change: Callable[[Any, Any], None]) -> Callable[[Any], Any]:
    def changed(model: Any) -> Any:
        other = copy.deepcopy(model)
        with torch.no_grad():
            change(other, planted())
        return other

    return changed


def _super_column(model: Any, truth: Any, factor: float, *, row: int | None = None) -> None:
    weight = model.model.layers[truth.layer].mlp.down_proj.weight
    column = weight[:, truth.neuron].clone()
    weight[:, truth.neuron] = column * factor if row is None else 0.0
    if row is not None:
        weight[row, truth.neuron] = column[truth.outlier_dimension]


def _no_key(model: Any, truth: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight[:, truth.outlier_dimension] = 0.0


def _swap(model: Any, truth: Any) -> None:
    layers = model.model.layers
    first, last = (copy.deepcopy(layers[at].state_dict()) for at in (0, 4))
    layers[0].load_state_dict(last)
    layers[4].load_state_dict(first)


def _rounded(model: Any, truth: Any) -> None:
    for name, weight in model.named_parameters():
        if "_proj" in name:
            weight.copy_(round_to(weight[None], format_of("int4_tensor"))[0] * 0.5)


def _noise(model: Any, part: str, size: float) -> None:
    generator = torch.Generator().manual_seed(3)
    for name, weight in model.named_parameters():
        if part in name:
            weight.add_(torch.randn(weight.shape, generator=generator) * weight.std() * size)


MODELS: dict[str, Callable[[Any], Any]] = {
    "rotary base": configured(rope_parameters={"rope_type": "default", "rope_theta": 100.0}),
    "norm epsilon": configured(rms_norm_eps=1e-1),
    "activation": configured(hidden_act="relu"),
    "super neuron's column is zero": _weights(lambda m, t: _super_column(m, t, 0.0)),
    "super neuron's column is tripled": _weights(lambda m, t: _super_column(m, t, 3.0)),
    "super neuron's column is a fifth": _weights(lambda m, t: _super_column(m, t, 0.2)),
    "outlier in another dimension": _weights(lambda m, t: _super_column(m, t, 1.0, row=(t.outlier_dimension + 5) % 48)),
    "keys do not read the outlier": _weights(_no_key),
    "BOS has the embedding of a letter": _weights(
        lambda m, t: m.model.embed_tokens.weight[BOS_ID].copy_(m.model.embed_tokens.weight[70])
    ),
    "two layers are swapped": _weights(_swap),
    "weights in int4 with a wrong scale": _weights(_rounded),
    "last norm is tripled": _weights(lambda m, t: m.model.norm.weight.mul_(3.0)),
    "unembedding is noisy": _weights(lambda m, t: _noise(m, "lm_head", 1.0)),
    "down-projections are noisy": _weights(lambda m, t: _noise(m, "down_proj", 3.0)),
    "attention outputs have the wrong sign": _weights(
        lambda m, t: [layer.self_attn.o_proj.weight.neg_() for layer in m.model.layers]
    ),
    "embeddings are shifted by a row": _weights(
        lambda m, t: m.model.embed_tokens.weight.copy_(m.model.embed_tokens.weight.roll(1, 0))
    ),
}
"""Breakage -> the second model."""


def sequences() -> TokenBatch:
    """The tokens that both models read."""
    return from_text(bundled_text(), tokenizer(), **SIZE)


def compared(
    first: Any,
    second: Any,
    *,
    out: Path,
    before: Any = None,
    own: Any = None,
    batch: Any = None,
    tokens: TokenBatch | None = None,
) -> Any:
    """One comparison; ``before`` and ``own`` are the tokenizers of the two models."""
    a = wrap(first, tokenizer=before or tokenizer(), name="base")
    b = wrap(second, tokenizer=own or tokenizer(), name="tuned")
    return diff(a, b, tokens=tokens or sequences(), batch=batch, out=out, overwrite=True, progress=False)


def cases() -> Iterator[Case]:
    """Every comparison: broken or healthy, its name, and both models with tokenizer and batch."""
    model = base()
    for name, make in TOKENIZERS.items():
        yield "broken", name, {"first": model, "second": model, "own": make()}
    for name, make_batch in BATCHES.items():
        yield "broken", name, {"first": model, "second": model, "batch": make_batch()}
    for name, change in MODELS.items():
        yield "broken", name, {"first": model, "second": change(model)}
    healthy = list(HEALTHY_BATCHES.values())
    for seed in range(20):
        given = {"first": model, "second": tuned(seed, model), "batch": healthy[seed % 4]()}
        yield "healthy", f"fine-tune {seed}", given


def _share(found: int, n: int) -> str:
    bound = binomtest(found, n, alternative="less").proportion_ci().high
    return f"{found} of {n} (at most {100 * bound:.1f}%, Clopper-Pearson, one-sided 95%)"


def judge(cases: Iterable[Case], path: str) -> None:
    """Compare in every case, write a row for each, print how many alarmed.

    A model that is refused has no alarms; an error that is not ours is a crash, which finds nothing.
    """
    found: dict[str, list[str]] = {"broken": [], "healthy": []}
    with tempfile.TemporaryDirectory() as folder, Path(path).open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("kind", "case", "alarms", "conclusion"))
        for kind, name, given in cases:
            try:
                decision = compared(out=Path(folder) / "run", **given).decision
                answer, said = "alarm" if decision["alarms"] else "none", decision["sentence"]
                writer.writerow((kind, name, decision["alarms"], said[:160]))
            except SinkLensError as error:
                answer = "refused"
                writer.writerow((kind, name, "", f"refused: {error}"[:160]))
            except Exception as error:  # noqa: BLE001 - what a user would see as a traceback
                answer = "crashed"
                writer.writerow((kind, name, "", f"crashed: {type(error).__name__}: {error}"[:160]))
            file.flush()
            found[kind].append(answer)
    broken, healthy = found["broken"], found["healthy"]
    for kind, wanted, answers in (("breakages", "missed", broken), ("healthy fine-tunes", "alarmed", healthy)):
        if answers:
            alarms, refused, crashed = (answers.count(one) for one in ("alarm", "refused", "crashed"))
            wrong = len(answers) - alarms - refused if wanted == "missed" else alarms
            print(
                f"{kind}: {alarms} alarms, {refused} refused, {crashed} crashed; {wanted} {_share(wrong, len(answers))}"
            )


if __name__ == "__main__":
    judge(cases(), sys.argv[1])
