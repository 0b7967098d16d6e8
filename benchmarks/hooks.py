"""How much of what the commands read and edit is registered at hook points of the bridge, and at which.

    python benchmarks/hooks.py               # ten seconds
    python benchmarks/hooks.py --analyses    # and each folder of analyses/, in tiny mode: two minutes

On a tiny random Llama, every function that sink_lens registers is counted while trace, sweep, patch, tokens and card
run: at hook points of the bridge, by site; at modules, which reads or edits there would be; and what the attention
function hands over itself (``activations.attention.OBSERVED``), since a log-sum-exp has no hook point.
"""

import argparse
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from torch import nn
from transformer_lens.hook_points import HookPoint

from sink_lens import studies, sweep, trace
from sink_lens.activations import attention
from sink_lens.data.tokens import TokenBatch
from sink_lens.edits import metrics
from sink_lens.models.lens import LensModel
from sink_lens.models.load import wrap
from sink_lens.models.tiny import tiny_tokenizer
from sink_lens.patching import patch
from sink_lens.sweeps import EditGrid, Grid
from tests.tiny_families import tiny

TEXT = (
    "the cat and the dog sat on the mat and looked at the sun, as they had done on the day before. "
    * 40
)
CONTROL = frozenset({"_finish", "_end", "begin", "_keep_batch_shape"})
"""Module hooks that read and edit nothing: they end a pass, begin it with a stream, or note a batch's size."""


@contextmanager
def counted() -> Iterator[dict[str, Counter[str]]]:
    """Count registrations: at hook points by the hook's last words, at modules and in the attention by name."""
    found: dict[str, Counter[str]] = {
        "hook points": Counter(),
        "modules": Counter(),
        "attention": Counter(),
    }
    add, after, before = (
        HookPoint.add_hook,
        nn.Module.register_forward_hook,
        nn.Module.register_forward_pre_hook,
    )
    observe = attention._observed_quantity

    def add_hook(point: HookPoint, *args: Any, **options: Any) -> Any:
        found["hook points"][
            str(point.name).partition("blocks.")[2].partition(".")[2] or str(point.name)
        ] += 1
        return add(point, *args, **options)

    def module_hook(register: Callable[..., Any]) -> Callable[..., Any]:
        def count(module: nn.Module, hook: Any, **options: Any) -> Any:
            caller = sys._getframe(1)
            own = str(caller.f_globals.get("__name__", "")).startswith("sink_lens")
            name = getattr(hook, "__name__", str(hook))
            if (
                own
                and not isinstance(module, HookPoint)
                and not {name, caller.f_code.co_name} & CONTROL
            ):
                found["modules"][f"{caller.f_globals['__name__']}.{caller.f_code.co_name}"] += 1
            return register(module, hook, **options)

        return count

    def observed(name: str, *args: Any) -> Any:
        found["attention"][name] += 1
        return observe(name, *args)

    HookPoint.add_hook = add_hook
    nn.Module.register_forward_hook, nn.Module.register_forward_pre_hook = (
        module_hook(after),
        module_hook(before),
    )
    attention._observed_quantity = observed
    try:
        yield found
    finally:
        HookPoint.add_hook, attention._observed_quantity = add, observe
        nn.Module.register_forward_hook, nn.Module.register_forward_pre_hook = after, before


def commands(lens: LensModel, folder: Path) -> dict[str, Callable[[], object]]:
    """The commands on a tiny model: name -> call."""
    batch = TokenBatch.from_text(TEXT, lens.tokenizer, sequences=4, length=32)
    small: dict[str, Any] = {"tokens": batch, "progress": False}
    grid = Grid.of(EditGrid(kind="zero", site="neurons", units=[3, 4]), controls=2)
    other = batch.tokens.roll(1, 0)
    return {
        "trace": lambda: trace(
            lens, out=folder / "trace", report=False, random_init=False, **small
        ),
        "sweep": lambda: sweep(lens, grid, out=folder / "sweep", **small),
        "patch": lambda: patch(
            lens, batch.tokens, other, metric=metrics.sink_mass(0), progress=False
        ),
        "tokens": lambda: studies.sink_tokens(lens, out=folder / "tokens", **small),
        "card": lambda: studies.card(lens, out=folder / "card", **small),
    }


def claims(folder: Path) -> dict[str, Callable[[], object]]:
    """The analyses of the papers' claims, in tiny mode: name -> call."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from analyses.claims import run_claim

    found = sorted(
        path.parent for path in (Path(__file__).parents[1] / "analyses").glob("*/*/claim.md")
    )
    return {
        one.name: partial(run_claim, one, out=folder / one.name, tiny=True, progress=False)
        for one in found
    }


def main() -> None:
    """Print the counts and the table of hook points."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--analyses", action="store_true", help="count those of analyses/ as well")
    options = parser.parse_args()
    lens = wrap(tiny("llama"), tokenizer=tiny_tokenizer())
    rows, points = [], {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runs = commands(lens, Path(folder)) | (claims(Path(folder)) if options.analyses else {})
        for name, run in runs.items():
            with counted() as found:
                run()
            totals = {what: counts.total() for what, counts in found.items()}
            rows.append({"run": name, **totals})
            points[name] = ", ".join(sorted(found["hook points"]))
            for what in ("modules", "attention"):
                if found[what]:
                    print(f"{name}, {what}: {dict(found[what])}")
    print(pd.DataFrame(rows).to_string(index=False))
    print()
    for name, at in points.items():
        print(f"{name}: {at}")


if __name__ == "__main__":
    main()
