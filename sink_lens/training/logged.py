"""Runs of the user's own Trainer beside each other: the losses in ``trainer_state.json``, the sinks of a monitor.

The monitor's readings are those in the Trainer's log history, or else of the one run of the monitor in the folder.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from ..errors import InputError, RunError
from ..files import parse_json
from ..records import RUN_FILE, Result, create_run, package_versions, read_run
from ..schema import MIN_SINK_RATE, SINK_THRESHOLD
from ..text import join_and, percent
from .config import CompareConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STATE = "trainer_state.json"
QUANTITIES = {
    "training loss": ("loss", "nats"),
    "evaluation loss": ("eval_loss", "nats"),
    "sink rate": ("sinks/rate_first", "1"),
}
"""Quantity -> its name in the Trainer's log history, and its unit."""
_STEP = "sinks/step"


@dataclass(frozen=True, kw_only=True, repr=False)
class LogComparison(Result):
    """What Trainers logged, side by side; the table ``logged`` has a row per run, step and quantity."""

    main = "logged"
    config: CompareConfig

    def notebook_parts(self) -> tuple[object, ...]:
        """Return the figure."""
        return (self.figure(),)

    def figure(self) -> "Figure":
        """Draw all losses on one axis, and the sink rate below."""
        from .pages.training import draw_logged

        return draw_logged(self.tables["logged"])

    def write(self, folder: Path, *, overwrite: bool) -> None:
        """Write the comparison into a run folder."""
        with create_run(
            folder,
            kind="compare",
            config=asdict(self.config),
            provenance={"versions": package_versions()},
            expects=("logged",),
            overwrite=overwrite,
        ) as writer:
            writer.write_table("logged", self.tables["logged"])
            writer.write_findings(self.sentences, notes=self.notes)


def are_logged(runs: Sequence[str | os.PathLike[str]]) -> bool:
    """Check whether ``runs`` are those of the user's own Trainer or of a monitor, and not of ``sink-lens train``.

    Raises:
        InputError: some are, and some are not.
    """
    own = [
        one
        for one in map(Path, runs)
        if _kind_of(one) == "monitor" or (_kind_of(one) is None and _states(one))
    ]
    if own and len(own) < len(runs):
        others = [str(one) for one in runs if Path(one) not in own]
        raise InputError(
            f"{join_and(map(str, own))} {'is a run' if len(own) == 1 else 'are runs'} of your own Trainer or of a "
            f"monitor, and {join_and(others)} not; need runs of one kind."
        )
    return bool(own)


def compare_logged(config: CompareConfig) -> LogComparison:
    """Compare what the Trainers of ``config.runs`` logged; one seed has no interval, so that no verdict is given.

    Raises:
        InputError: fewer than two runs, or fields that say what runs of ``sink-lens train`` differ in.
        RunError: a log cannot be read, or has neither losses nor sinks.
    """
    if len(config.runs) < 2:
        raise InputError(f"{len(config.runs)} runs were given; need two at least.")
    if (config.group_by, config.baseline, config.threshold) != (None, None, SINK_THRESHOLD):
        raise InputError(
            "group_by, baseline and threshold are of runs of sink-lens train; these are of your own Trainer. Leave "
            "them out"
        )
    paths = [Path(one) for one in config.runs]
    names = [(path.parent if path.name == STATE else path).resolve().name for path in paths]
    names = names if len(set(names)) == len(names) else [str(path) for path in paths]
    frames, notes, thresholds = [], [], dict[str, float]()
    for name, path in zip(names, paths, strict=True):
        frame, note, threshold = _read_logged(path)
        frames.append(frame.assign(run=name))
        if note:
            notes.append(note)
        if threshold is not None:
            thresholds[name] = threshold
    if len(set(thresholds.values())) > 1:
        told = join_and(f"{threshold:g} for “{name}”" for name, threshold in thresholds.items())
        notes.append(f"the sink rates are not alike: their thresholds of the sink score are {told}")
    table = pd.concat(frames, ignore_index=True).reindex(
        columns=["run", "step", "quantity", "value", "unit"]
    )
    table = table.astype({"quantity": "str", "unit": "str"})
    told = [
        f"{join_and(names)}: what was logged, of one run each. One seed has no interval: "
        "no difference can be told from chance."
    ]
    for quantity in QUANTITIES:
        rows = table.loc[table["quantity"] == quantity]
        values = {
            str(name): dict(zip(own["step"], own["value"], strict=True))
            for name, own in rows.groupby("run", sort=False)
        }
        if values:
            told.append(_sentence(quantity, values))
    return LogComparison(
        folder=None,
        config=config,
        tables={"logged": table},
        headline="\n".join(told),
        notes=tuple(notes),
    )


def _sentence(quantity: str, values: dict[str, dict[int, float]]) -> str:
    is_rate, each, births = quantity == "sink rate", [], ""
    shared = set.intersection(*(set(own) for own in values.values()))
    for name, own in values.items():
        at = max(shared or own)
        value = percent(own[at]) if is_rate else f"{own[at]:.4f}"
        each.append(f"{value} for “{name}”" + ("" if shared else f" (step {at:,})"))
        if is_rate:
            low = [step for step in own if own[step] < MIN_SINK_RATE]
            later = [step for step in own if step > max(low, default=-1)]
            start = f"step {min(later):,}" if low and later else "the first reading"
            births += (
                f" “{name}” has {f'a sink from {start} on' if later else 'no sink at the end'}."
            )
    when = f"at step {max(shared):,}, the last that all logged" if shared else "at the end"
    what = "share of heads with a sink at position 0" if is_rate else f"{quantity} in nats"
    rule = f" (A sink: {MIN_SINK_RATE:.0%} of heads at least.)" if is_rate else ""
    return f"The {what}, {when}: {join_and(each)}.{births}{rule}"


def _read_logged(path: Path) -> tuple[pd.DataFrame, str, float | None]:
    """Return (step, quantity, value and unit of all that was logged, a note if sinks are left out, the threshold).

    The threshold of the sink score is None where the sinks are not those of a monitor's run.
    """
    rows: list[tuple[object, ...]] = []
    states = _states(path.parent if _kind_of(path) == "monitor" and not _states(path) else path)
    if states:
        try:
            read = [parse_json(one.read_text(encoding="utf-8")) for one in states]
            newest = max(read, key=lambda state: state["global_step"])
            rows += [
                (int(entry.get(_STEP, entry["step"])), quantity, float(entry[name]), unit)
                for entry in newest["log_history"]
                for quantity, (name, unit) in QUANTITIES.items()
                if name in entry
            ]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(
                f"{states[-1]} is no state of a Trainer ({error}); need the file as it was saved"
            ) from error
    frame = pd.DataFrame(rows, columns=["step", "quantity", "value", "unit"])
    note, threshold = "", None
    if "sink rate" not in set(frame["quantity"].tolist()):
        inside = [path, *(path.iterdir() if path.is_dir() else ())]
        monitors = [one for one in inside if _kind_of(one) == "monitor"]
        if len(monitors) == 1:
            run = read_run(monitors[0])
            threshold = run.config.get("threshold")
            table = run.need("monitor", columns=["step", "key", "layer", "value"])
            rate = table.loc[(table["key"] == "rate_first") & table["layer"].isna()]
            rate = rate[["step", "value"]].assign(quantity="sink rate", unit="1")
            frame = rate if frame.empty else pd.concat([frame, rate], ignore_index=True)
        elif monitors:
            note = (
                f"{path} has several runs of the monitor: its sinks are left out. Give one of them"
            )
    if frame.empty:
        raise RunError(
            f"{path} has no loss and no reading of a monitor; need a log. Train with logging_steps."
        )
    return frame.astype({"step": "int64", "value": "float64"}), note, threshold


def _states(path: Path) -> list[Path]:
    if path.name == STATE:
        return [path] if path.is_file() else []
    return sorted([*path.glob(STATE), *path.glob(f"checkpoint-*/{STATE}")])


def _kind_of(path: Path) -> str | None:
    return read_run(path).kind if (path / RUN_FILE).is_file() else None
