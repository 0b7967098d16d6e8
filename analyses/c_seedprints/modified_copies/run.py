"""SeedPrint of a model against copies that were rounded, pruned, merged and trained on; see claim.md."""

import contextlib
import copy
import warnings
from collections.abc import Callable
from importlib.util import find_spec

import pandas as pd
import torch
from torch import Tensor

from analyses.claims import Measured, Work, certain, main
from sink_lens import LensModel, wrap
from sink_lens.edits import quantised_weights
from sink_lens.errors import InputError
from sink_lens.identity import FingerprintConfig, fingerprint
from sink_lens.models.load import random_init
from sink_lens.report.style import BLUE, INK, ORANGE, legend, new_figure, panel, without_formulas

OTHERS = (11, 12)
"""Seeds of the unrelated models: one that is compared and averaged, and one that the average is held against."""


def measure(work: Work) -> Measured:
    """The log p of each copy with the model, and with an unrelated one."""
    if find_spec("peft") is None:
        raise InputError(
            "PEFT is not installed, which one copy is tuned with; need pip install peft"
        )
    lens = work.lens
    copies: dict[str, Callable[[], LensModel]] = {
        "8 bit": lambda: rounded(lens, "int8_token"),
        "4 bit": lambda: rounded(lens, "int4_group"),
        "30% pruned": lambda: changed(lens, "30% pruned", pruned(0.3)),
        "60% pruned": lambda: changed(lens, "60% pruned", pruned(0.6)),
        "averaged": lambda: averaged(lens, random_init(lens, seed=OTHERS[0])),
        "LoRA": lambda: trained_on(work, low_rank=True),
        "trained on": lambda: trained_on(work, low_rank=False),
    }
    few = {"sequences": 60, "length": 4, "coordinates": 28, "draws": 100, "relabellings": 100}
    size = work.size(
        {"sequences": 1000, "length": 4, "alpha": 0.05, "draws": 20, "relabellings": 99}, few
    )
    config = FingerprintConfig(inputs="tokens", seed=1, **size)

    def pair(name: str) -> pd.DataFrame:
        changed_copy = copies[name]()
        other = random_init(lens, seed=OTHERS[1] if name == "averaged" else OTHERS[0])
        found = fingerprint(
            [lens, changed_copy, other], config=config, cache=not work.tiny, progress=work.progress
        )
        rows = found.frame.set_index(["a", "b"])
        chosen = {
            "copy": rows.loc[(lens.name, changed_copy.name)],
            "unrelated": rows.loc[(changed_copy.name, other.name)],
        }
        return pd.DataFrame(
            [
                {"pair": key, "log10_p": row["log10_p_relabelled"], "tau_bar": row["tau_bar"]}
                for key, row in chosen.items()
            ]
        )

    tables = {
        name: work.once(f"copy-{at}", lambda name=name: pair(name)).set_index("pair")
        for at, name in enumerate(copies)
    }
    numbers = {
        f"{'heavy' if name.startswith('60') else 'kept'} @ {name}": certain(
            table.loc["copy", "log10_p"]
        )
        for name, table in tables.items()
    }
    numbers |= {
        f"unrelated @ {name}": certain(table.loc["unrelated", "log10_p"])
        for name, table in tables.items()
    }
    numbers |= {
        f"effect @ {name}": certain(table.loc["copy", "tau_bar"]) for name, table in tables.items()
    }
    order = ("kept", "heavy", "unrelated", "effect")
    ordered = dict(sorted(numbers.items(), key=lambda one: order.index(one[0].partition(" @ ")[0])))

    figure = new_figure(width=6.4, height=3.2)
    axes = panel(figure, ylabel="tau_bar")
    for shift, key, colour in ((-0.1, "copy", ORANGE), (0.1, "unrelated", BLUE)):
        values = [table.loc[key, "tau_bar"] for table in tables.values()]
        label = "with the model" if key == "copy" else "with an unrelated one"
        axes.plot([at + shift for at in range(len(values))], values, "o", color=colour, label=label)
    axes.axhline(0, color=INK, linewidth=1)
    axes.set_xticks(range(len(tables)), list(tables))
    legend(axes, columns=2)
    return Measured(numbers=ordered, figure=without_formulas(figure))


def changed(lens: LensModel, name: str, change: Callable[[str, Tensor], Tensor]) -> LensModel:
    """A copy whose matrices but the embeddings are changed."""
    plain = copy.deepcopy(lens.plain)
    with torch.no_grad():
        for key, weight in plain.named_parameters():
            if weight.ndim > 1 and "embed" not in key and "lm_head" not in key:
                weight.copy_(change(key, weight))
    return wrap(plain, tokenizer=lens.tokenizer, name=f"{lens.name}, {name}")


def rounded(lens: LensModel, form: str) -> LensModel:
    """A copy with rounded weights."""
    found = changed(lens, form, lambda _, weight: weight)
    with contextlib.ExitStack() as stack:
        stack.enter_context(quantised_weights(found, form))
        plain = copy.deepcopy(found.plain)
    return wrap(plain, tokenizer=lens.tokenizer, name=f"{lens.name}, {form}")


def pruned(share: float) -> Callable[[str, Tensor], Tensor]:
    """Set the smallest entries of a matrix to zero."""

    def change(_: str, weight: Tensor) -> Tensor:
        least = weight.abs().flatten().kthvalue(max(1, int(share * weight.numel()))).values
        return torch.where(weight.abs() <= least, torch.zeros_like(weight), weight)

    return change


def averaged(lens: LensModel, other: LensModel) -> LensModel:
    """The average with another model, whose matrices are scaled to the same deviation."""
    foreign = dict(other.plain.named_parameters())

    def change(key: str, weight: Tensor) -> Tensor:
        return (weight + foreign[key] * (weight.std() / foreign[key].std())) / 2

    return changed(lens, "averaged", change)


def trained_on(work: Work, *, low_rank: bool) -> LensModel:
    """A copy after some steps on a text, of all weights or of LoRA's alone, which are merged."""
    lens, plain = work.lens, copy.deepcopy(work.lens.plain)
    torch.manual_seed(work.seed)  # PEFT draws LoRA's start from the global generator
    if low_rank:
        import peft

        with warnings.catch_warnings(
            action="ignore", category=FutureWarning
        ):  # PEFT reads what transformers gives up
            plain = peft.get_peft_model(
                plain, peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
            )
    weights = (
        [weight for weight in plain.parameters() if weight.requires_grad]
        if low_rank
        else list(plain.parameters())
    )
    optimiser = torch.optim.AdamW(
        [one.requires_grad_() for one in weights], lr=1e-3 if low_rank else 1e-4
    )
    batches = work.text(sequences=4 * work.size(40, 2), length=64).tokens.split(4)
    with torch.enable_grad():
        for batch in batches:
            optimiser.zero_grad()
            plain(input_ids=batch, labels=batch).loss.backward()
            optimiser.step()
    if low_rank:
        plain = plain.merge_and_unload()
    name = "LoRA" if low_rank else "trained on"
    return wrap(plain.requires_grad_(False), tokenizer=lens.tokenizer, name=f"{lens.name}, {name}")


if __name__ == "__main__":
    main(measure)
