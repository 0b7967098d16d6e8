"""Forms in which a batch is given, and what each result must be at the place of each token, by plain Hugging Face.

A form says where its texts stand: ``(row, column, ids)``. The reference of a text is the Hugging Face model on it,
with hooks of torch: no padding, no packing, nothing of this library. ``check`` compares a result of a form with it at
each text's own index, and demands nan (False in a mask) at every other index.
"""

import functools
import itertools
import warnings
from dataclasses import dataclass
from typing import Any

import lenses
import torch
from transformers import DataCollatorWithFlattening

from sink_lens import SITES, answers, capture, circuits, patching, run_with, sink_mask
from sink_lens.activations.sink_mask import sink_scores
from sink_lens.data.tokens import TokenBatch
from sink_lens.edits import metrics
from sink_lens.errors import SinkLensError
from sink_lens.models.tiny import tiny_tokenizer
from sink_lens.training import SinkMonitor
from tests.tiny_families import tiny

FAMILIES = (
    *("llama", "gpt2", "gemma2", "mistral", "bloom", "falcon", "mixtral"),
    *("qwen3_5", "lfm2", "deepseek_v3"),
)
LENGTHS = (9, 12, 5)
CLOSE = 1e-4
BOS, PAD, RIGHT, WRONG = 1, 0, 17, 40
SITES_READ = ("resid_pre", "resid_post", "pattern", "final")


@dataclass(frozen=True, kw_only=True)
class Form:
    """A batch as it is given, and where its texts stand in it."""

    given: Any
    texts: tuple[tuple[int, int, tuple[int, ...]], ...]
    shape: tuple[int, int]
    unlabelled: int = 0
    """Tokens of each text, from its first on, whose labels are -100."""
    monitored: tuple[tuple[int, int, int], ...] | None = None
    """Row, column and length of the texts that the model itself keeps apart; None: all."""


def texts(lengths: tuple[int, ...] = LENGTHS, *, second: int | None = None) -> list[list[int]]:
    """Random texts; ``second`` replaces the second token of each."""
    drawn = torch.randint(
        3, 300, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(8)
    ).tolist()
    rows = [row[:length] for row, length in zip(drawn, lengths, strict=True)]
    return [
        [row[0], second, *row[2:]] if second is not None and len(row) > 1 else row for row in rows
    ]


def padded(
    rows: list[list[int]], *, width: int = max(LENGTHS), before: list[int] | None = None
) -> dict[str, Any]:
    """Rows of ids with ``before`` places of padding in front (None: none), and their mask."""
    before = before or [0] * len(rows)
    both = [(lead, row, width - lead - len(row)) for lead, row in zip(before, rows, strict=True)]
    return {
        "input_ids": torch.tensor([[PAD] * lead + row + [PAD] * rest for lead, row, rest in both]),
        "attention_mask": torch.tensor(
            [[0] * lead + [1] * len(row) + [0] * rest for lead, row, rest in both]
        ),
    }


def by_row(
    given: Any, rows: list[list[int]], before: list[int], *, width: int = max(LENGTHS), **more: Any
) -> Form:
    places = tuple(
        (number, lead, tuple(row))
        for number, (lead, row) in enumerate(zip(before, rows, strict=True))
    )
    return Form(given=given, texts=places, shape=(len(rows), width), **more)


def flat(given: Any, rows: list[list[int]], **more: Any) -> Form:
    starts = [0, *itertools.accumulate(map(len, rows))]
    places = tuple((0, start, tuple(row)) for start, row in zip(starts, rows, strict=False))
    more.setdefault(
        "monitored", tuple((0, start, len(row)) for start, row in zip(starts, rows, strict=False))
    )
    return Form(given=given, texts=places, shape=(1, starts[-1]), **more)


@functools.cache
def forms(second: int | None = None) -> dict[str, Form]:
    """Every form, by name; with ``second``, of texts with another second token."""
    rows = texts(second=second)
    late = [max(LENGTHS) - len(row) for row in rows]
    some = [one // 2 for one in late]
    right, left, both = (padded(rows, before=before) for before in (None, late, some))
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    flattened = dict(collator([{"input_ids": row} for row in rows]))
    ids = {"input_ids": flattened["input_ids"]}
    two = [rows[0] + rows[2], rows[1] + [5, 7]]  # 14 tokens each; the last two are a text
    places = [[*range(9), *range(5)], [*range(12), 0, 1]]
    short = [[row[0]] for row in rows] if second is None else [[second] for _ in rows]
    twice = [[BOS, BOS, *row[1:]] for row in rows]
    spoken = tiny_tokenizer(adds_bos=True)
    spoken.chat_template = "{% for one in messages %}{{ one['content'] }}{% endfor %}"
    said = [[{"role": "user", "content": "the cat saw the dog"}]] * 2
    chat = spoken.apply_chat_template(said, return_tensors="pt", return_dict=True, padding=True)
    chat["input_ids"][:, 1] = chat["input_ids"][:, 1] if second is None else second
    chatted = chat["input_ids"].tolist()
    embeds = torch.zeros(*right["input_ids"].shape, 48)
    block = torch.full((3, 1, max(LENGTHS), max(LENGTHS)), torch.finfo(torch.float32).min).triu(1)
    whole = tuple((row, 0, max(LENGTHS)) for row in range(3))
    labels = torch.where(right["attention_mask"] == 1, right["input_ids"], -100)
    labels[:, :3] = -100
    nowhere = [0, 0, 0]
    return {
        "padded on the right": by_row(right, rows, nowhere),
        "padded on the left": by_row(left, rows, late),
        "padded on both sides": by_row(both, rows, some),
        "ragged lists": by_row({"input_ids": rows}, rows, nowhere),
        "flattened by the collator": flat(flattened, rows),
        "packed, with position ids": Form(
            given={"input_ids": torch.tensor(two), "position_ids": torch.tensor(places)},
            texts=(
                (0, 0, tuple(rows[0])),
                (0, 9, tuple(rows[2])),
                (1, 0, tuple(rows[1])),
                (1, 12, (5, 7)),
            ),
            shape=(2, 14),
            monitored=((0, 0, 9), (0, 9, 5), (1, 0, 12), (1, 12, 2)),
        ),
        "cu_seq_lens alone": flat(ids | {"cu_seq_lens_q": flattened["cu_seq_lens_q"]}, rows),
        "seq_idx alone": flat(
            ids | {"seq_idx": flattened["seq_idx"]}, rows, monitored=((0, 0, sum(LENGTHS)),)
        ),
        "labels with -100": by_row(right | {"labels": labels}, rows, nowhere, unlabelled=3),
        "NumPy arrays": by_row({name: one.numpy() for name, one in left.items()}, rows, late),
        "lists of one text": by_row(
            {"input_ids": rows[0], "attention_mask": [1] * 9}, rows[:1], [0], width=9
        ),
        "rows of one token": by_row({"input_ids": torch.tensor(short)}, short, nowhere, width=1),
        "a chat template": by_row(chat, chatted, [0, 0], width=len(chatted[0])),
        "BOS twice": by_row(padded(twice, before=late, width=13), twice, late, width=13),
        "a mask of truth": by_row(
            left | {"attention_mask": left["attention_mask"].bool()}, rows, late
        ),
        "zeros as token types": by_row(
            right | {"token_type_ids": 0 * right["input_ids"]}, rows, nowhere
        ),
        "ids with embeds": by_row(right | {"inputs_embeds": embeds}, rows, nowhere),
        "a mask with four axes": by_row(
            right | {"attention_mask": block}, rows, nowhere, monitored=whole
        ),
        "a mask of text numbers": by_row(
            right | {"attention_mask": right["attention_mask"] * 2}, rows, nowhere
        ),
        "a key that nothing reads": by_row(
            right | {"image_sizes": torch.ones(3, 2)}, rows, nowhere
        ),
        "labels of other tokens": by_row(right | {"labels": right["input_ids"] + 1}, rows, nowhere),
        "a batch of one's own": by_row(
            TokenBatch.from_tensor(left["input_ids"], attention_mask=left["attention_mask"]),
            rows,
            nowhere,
        ),
    }


FORMS = tuple(forms())


@functools.cache
def model_of(family: str) -> Any:
    return tiny(family, attn_implementation="eager")


def layers_of(model: Any) -> Any:
    """The list of the model's decoder layers."""
    found = [one for one in model.base_model.children() if isinstance(one, torch.nn.ModuleList)]
    return max(found, key=len)


@dataclass(frozen=True, kw_only=True)
class Plain:
    """What plain Hugging Face gives for one text."""

    logits: Any
    into: list[Any]
    """The stream into each layer."""
    out: list[Any]
    final: Any
    attentions: dict[int, Any]


def run_plain(
    family: str,
    ids: tuple[int, ...] | dict[str, Any],
    *,
    change: tuple[int, Any] | None = None,
    grad: bool = False,
) -> Plain:
    """Run the Hugging Face model on a text, or on its inputs; ``change`` is (layer, function of the stream into it)."""
    model, into, out, final, attentions = model_of(family), [], [], [], {}
    handles = []

    def enter(module: Any, args: Any, kwargs: Any) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        if change is not None and change[0] == len(into):
            x = change[1](x.clone())
        if grad and x.requires_grad:
            x.retain_grad()
        into.append(x)
        return ((x, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": x})

    def leave(module: Any, args: Any, output: Any) -> None:
        out.append(output[0] if isinstance(output, tuple) else output)

    def attend(module: Any, args: Any, output: Any, layer: int) -> None:
        if (
            isinstance(output, tuple)
            and len(output) > 1
            and isinstance(output[1], torch.Tensor)
            and output[1].dim() == 4
        ):
            attentions[layer] = output[1]

    for number, layer in enumerate(layers_of(model)):
        handles += [
            layer.register_forward_pre_hook(enter, with_kwargs=True),
            layer.register_forward_hook(leave),
        ]
        for name, module in layer.named_modules():
            if name.split(".")[-1] in ("self_attn", "attn", "attention", "self_attention"):
                handles.append(
                    module.register_forward_hook(functools.partial(attend, layer=number))
                )
    handles.append(
        model.base_model.register_forward_hook(lambda module, args, output: final.append(output[0]))
    )
    try:
        with torch.set_grad_enabled(grad):
            given = ids if isinstance(ids, dict) else {"input_ids": torch.tensor([ids])}
            logits = model(**given, use_cache=False, output_attentions=True).logits
    finally:
        for handle in handles:
            handle.remove()
    return Plain(logits=logits, into=into, out=out, final=final[0], attentions=attentions)


plain = functools.cache(run_plain)


class DifferentError(AssertionError):
    """A result that is not what plain Hugging Face gives at the same index."""


def compare(found: Any, wanted: Any, what: str) -> None:
    """Demand that two tensors are close, nan at the same places; infinities and masked scores are not among them."""
    found, wanted = torch.as_tensor(found).double(), torch.as_tensor(wanted).double()
    if found.shape != wanted.shape:
        raise DifferentError(f"{what}: shape {tuple(found.shape)} for {tuple(wanted.shape)}")
    if not torch.equal(found.isnan(), wanted.isnan()):
        raise DifferentError(f"{what}: nan at other places")
    gap, size = (
        float(one.abs().nan_to_num(0.0).max()) if one.numel() else 0.0
        for one in (found - wanted, wanted)
    )
    if not gap <= CLOSE * max(1.0, size):
        raise DifferentError(f"{what}: off by {gap:.2g}")


def laid(form: Form, values: list[Any], *, first: int = 0) -> Any:
    """A tensor of the form's shape with each text's ``values`` at its place and nan elsewhere."""
    rows, columns = form.shape
    whole = torch.full((rows, columns - first, *values[0].shape[1:]), torch.nan)
    for (row, column, _), own in zip(form.texts, values, strict=True):
        whole[row, column : column + len(own)] = own.detach()
    return whole


def laid_pattern(form: Form, values: list[Any]) -> Any:
    """As ``laid`` for tensors "head query key"."""
    rows, columns = form.shape
    whole = torch.full((rows, len(values[0]), columns, columns), torch.nan)
    for (row, column, ids), own in zip(form.texts, values, strict=True):
        at = slice(column, column + len(ids))
        whole[row, :, at, at] = own.detach()
    return whole


def token_losses(family: str, form: Form) -> list[Any]:
    """Each text's losses from its second token on; nan where labels leave a token out."""
    found = []
    for _, _, ids in form.texts:
        logits = plain(family, ids).logits[0, :-1].float()
        own = torch.nn.functional.cross_entropy(
            logits, torch.tensor(ids[1:], dtype=torch.long), reduction="none"
        )
        own[: max(0, form.unlabelled - 1)] = torch.nan
        found.append(own)
    return found


def answer_differences(family: str, form: Form, **how: Any) -> Any:
    """The logit difference of two fixed tokens at the end of each text."""
    runs = [
        run_plain(family, ids, **how) if how else plain(family, ids) for _, _, ids in form.texts
    ]
    return torch.stack(
        [(run.logits[0, -1, RIGHT] - run.logits[0, -1, WRONG]).detach() for run in runs]
    )


def check_logits(family: str, form: Form, other: Form) -> None:
    run = run_with(lenses.lens_of(family), form.given, logits=True, loss=False)
    if isinstance(
        form.given, torch.Tensor | TokenBatch
    ):  # a batch of one's own has logits at its padding too
        run_logits = run.logits.masked_fill(~run.valid[..., None], torch.nan)
    else:
        run_logits = run.logits
    compare(
        run_logits, laid(form, [plain(family, ids).logits[0] for _, _, ids in form.texts]), "logits"
    )


def check_losses(family: str, form: Form, other: Form) -> None:
    run = run_with(lenses.lens_of(family), form.given)
    wanted = laid(form, token_losses(family, form), first=1)
    compare(run.token_loss, wanted, "token loss")
    compare(run.loss, wanted.nanmean(1), "loss")


def check_state(family: str, form: Form, other: Form) -> None:
    run = run_with(lenses.lens_of(family), form.given, positions=(0, -1), loss=False)
    wanted = [
        torch.stack([out[0, [0, -1]] for out in plain(family, ids).out]).detach()
        for _, _, ids in form.texts
    ]  # layer key d_model
    compare(run.state, torch.stack(wanted, dim=1), "state")


def mass_of(family: str, run: Plain, *, row: int, column: int, length: int) -> Any:
    """Mean attention to a text's first token over later queries that see it, "layer head"; nan without attention."""
    lens, rows = lenses.lens_of(family), []
    for layer in range(lens.n_layers):
        seen = slice(column + 1, column + min(lens.reach(layer) or length, length))
        nothing = torch.full((lens.n_heads,), torch.nan)
        rows.append(
            run.attentions[layer][row, :, seen, column].mean(1)
            if layer in run.attentions
            else nothing
        )
    return torch.stack(rows).detach()


def check_mass(family: str, form: Form, other: Form) -> None:
    run = run_with(lenses.lens_of(family), form.given, loss=False)
    wanted = [
        mass_of(family, plain(family, ids), row=0, column=0, length=len(ids))
        for _, _, ids in form.texts
    ]
    compare(run.mass[..., 0], torch.stack(wanted, dim=1), "mass")


def check_capture(family: str, form: Form, other: Form) -> None:
    lens, runs = lenses.lens_of(family), [plain(family, ids) for _, _, ids in form.texts]
    layer = next(iter(lens.attention_layers))
    found = capture(lens, form.given, sites=SITES_READ, layers=[layer])
    wanted = {
        "resid_pre": laid(form, [run.into[layer][0] for run in runs]),
        "resid_post": laid(form, [run.out[layer][0] for run in runs]),
        "pattern": laid_pattern(form, [run.attentions[layer][0] for run in runs]),
        "final": laid(form, [run.final[0] for run in runs]),
    }
    for site in SITES_READ:
        own = found[site, layer if SITES[site].per_layer else 0]
        if isinstance(form.given, TokenBatch):  # padding of a batch is captured too
            own = torch.where(wanted[site].isnan(), torch.nan, own)
        compare(own, wanted[site], site)


def check_sink_mask(family: str, form: Form, other: Form) -> None:
    lens, scores = lenses.lens_of(family), []
    for _, _, ids in form.texts:
        norms = torch.stack([out[0].norm(dim=-1) for out in plain(family, ids).out]).detach()
        scores.append((norms / norms.quantile(0.5, dim=1, keepdim=True)).amax(0))
    wanted = laid(form, scores)
    compare(sink_scores(lens, form.given, by="norm"), wanted, "scores")
    limit = float(wanted.nan_to_num(0.0).flatten().topk(3).values.mean())
    marked = sink_mask(lens, form.given, by="norm", threshold=limit)
    if not torch.equal(marked, wanted >= limit):
        raise DifferentError("sink_mask: other tokens")


def check_answers(family: str, form: Form, other: Form) -> None:
    table = answers(lenses.lens_of(family), form.given, top=3)
    wanted = torch.stack(
        [plain(family, ids).logits[0, -1].topk(3).values.detach() for _, _, ids in form.texts]
    )
    compare(table["logit"].to_numpy(copy=True).reshape(-1, 3), wanted, "answers")


def patching_of(family: str, form: Form, other: Form, *, how: Any, **fields: Any) -> Any:
    metric = metrics.logit_difference(RIGHT, WRONG)
    at = {
        "site": "resid_pre",
        "layers": [1],
        "by": ("position",),
        "metric": metric,
        "direction": "noising",
    }
    return how(lenses.lens_of(family), form.given, other.given, **at, **fields)


def check_patch(family: str, form: Form, other: Form) -> None:
    found = patching_of(family, form, other, how=patching.patch, controls=0, progress=False)
    for position in (0, 1, 3):
        wanted = []
        for (_, _, ids), (_, _, theirs) in zip(form.texts, other.texts, strict=True):
            if position >= len(ids):
                wanted.append(torch.tensor(torch.nan))
                continue

            def put(x: Any, source: Any, at: int) -> Any:
                x[:, at] = source[:, at]
                return x

            source = plain(family, theirs).into[1]
            run = run_plain(
                family, ids, change=(1, functools.partial(put, source=source, at=position))
            )
            wanted.append((run.logits[0, -1, RIGHT] - run.logits[0, -1, WRONG]).detach())
        if position < found.values.shape[0]:
            compare(found.values[position], torch.stack(wanted), f"patch of position {position}")


def check_attribution(family: str, form: Form, other: Form) -> None:
    found = patching_of(family, form, other, how=patching.attribution_patch)
    wanted = {}
    for (_, _, ids), (_, _, theirs) in zip(form.texts, other.texts, strict=True):
        run = run_plain(family, ids, grad=True)
        (run.logits[0, -1, RIGHT] - run.logits[0, -1, WRONG]).backward()
        effects = ((plain(family, theirs).into[1] - run.into[1]) * run.into[1].grad).sum(-1)[0]
        for position, effect in enumerate(effects.detach().tolist()):
            wanted.setdefault(position, []).append(effect)
    table = found.frame.set_index("position")["effect"]
    means = [sum(each) / len(each) for _, each in sorted(wanted.items())]
    compare(table.loc[sorted(wanted)].to_numpy(copy=True), means, "attribution")


def check_circuit(family: str, form: Form, other: Form) -> None:
    metric = metrics.logit_difference(RIGHT, WRONG)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whatever it says of a circuit of random weights
        found = circuits.find(
            lenses.lens_of(family), form.given, other.given, metric=metric, edges=20
        ).runs
    compare(found.clean_values, answer_differences(family, form), "clean values")
    compare(found.corrupted_values, answer_differences(family, other), "corrupted values")


def check_monitor(family: str, form: Form, other: Form) -> None:
    """The monitor reads the model's own forward: packed texts, and rows that begin with a text."""
    model = tiny(family, attn_implementation="eager")
    if isinstance(form.given, TokenBatch):
        raise SinkLensError("a model is not called with a TokenBatch")
    try:
        given = {
            name: one if isinstance(one, int) else torch.as_tensor(one)
            for name, one in form.given.items()
        }
        rows = {"input_ids", "attention_mask"}
        given = {
            name: one[None] if name in rows and one.dim() == 1 else one
            for name, one in given.items()
        }
        with SinkMonitor(model, every=1, sequences=9) as monitor:
            model(**given, use_cache=False)
            reading = monitor.step()
    except (TypeError, ValueError) as error:
        raise SinkLensError(f"the model itself: {type(error).__name__}") from error
    if reading is None:
        raise SinkLensError("the monitor stops with a warning")
    places = form.monitored or [(row, column, len(ids)) for row, column, ids in form.texts]
    run = run_plain(family, given)
    masses = [
        mass_of(family, run, row=row, column=column, length=length)
        for row, column, length in places
    ]
    for layer, wanted in enumerate(torch.stack(masses).mean((0, 2)).tolist()):
        if wanted == wanted and f"sinks/mass_first/layer_{layer}" not in reading:
            raise SinkLensError("the monitor warns, and leaves first tokens out")
        if wanted == wanted:
            compare(reading[f"sinks/mass_first/layer_{layer}"], wanted, f"monitor, layer {layer}")


RESULTS = {
    "logits": check_logits,
    "losses": check_losses,
    "state": check_state,
    "mass": check_mass,
    "capture": check_capture,
    "sink mask": check_sink_mask,
    "answers": check_answers,
    "patch": check_patch,
    "attribution": check_attribution,
    "circuit": check_circuit,
    "monitor": check_monitor,
}


def check(family: str, form: str, result: str) -> str:
    """Compare one result of one form with plain Hugging Face; return "" or the first words of what refused it."""
    first, second = forms()[form], forms(second=77)[form]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", ".*(begin with BOS twice|with the padding id|not the same place).*"
            )
            RESULTS[result](family, first, second)
    except SinkLensError as error:
        return f"{type(error).__name__}: {error}"
    return ""
