"""What run folders of 0.1 call columns, values and fields, and their names now.

Run folders are read under the names of today, whichever version wrote them. A column is renamed where a table has the
old name and lacks the new one, so that a folder that two versions wrote into is read too.
"""

from collections.abc import Mapping
from typing import Any

import pandas as pd

_AT_TARGET_AND_SINK = {
    f"{before}{what}_{old}": f"{before}{new}_{what}"
    for before in ("baseline_", "")
    for what in ("mass", "norm", "value")
    for old, new in (("new", "target"), ("old", "sink"))
}
_EFFECTS = {
    "baseline_mass_new": "baseline_target_mass",
    "sink_mass_new": "target_mass",
    "baseline_mass_old": "baseline_sink_mass",
    "sink_mass_old": "sink_mass",
    "uniform_mass_old": "uniform_sink_mass",
}
_SINK = {"position": "sink_position"}
_TARGET = {"position": "target_position"}
_PATCH = {"pos": "position", "head_index": "head", "src_pos": "key"}
_VARIANT = {"arm": "variant"}

COLUMNS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "trace": {
        **dict.fromkeys(("heads", "twin_heads", "layers", "dimensions", "growth_steps", "neurons"), _SINK),
        "arms": {"arm": "condition", **_SINK},
        "links": {"cut": "intervened"},
        "amplification": _TARGET,
        "effects": _EFFECTS,
        "mediation": {"hold": "frozen", "mass_without_hold": "mass_without_freeze"},
    },
    "isolate": dict.fromkeys(("layers", "summary"), _TARGET | _AT_TARGET_AND_SINK),
    "amplify": dict.fromkeys(("layers", "summary"), _AT_TARGET_AND_SINK),
    "patch": dict.fromkeys(("patches", "check", "summary"), _PATCH),
    "sweep": {name: {"place": "where"} for name in ("cells", "controls")},
    "compare": dict.fromkeys(("curves", "bands", "finals", "differences", "measures", "course", "births"), _VARIANT),
    "preference": dict.fromkeys(("models", "summary", "coverage", "tokens", "arms"), _VARIANT),
    "contraction": {
        **dict.fromkeys(("models", "summary", "alignment", "arms"), _VARIANT),
        **{name: {**_VARIANT, "place": "stage"} for name in ("layers", "positions")},
        "agreement": {"place": "stage"},
    },
    "calibration": dict.fromkeys(("models", "summary", "arms"), _VARIANT),
}
"""Kind of run -> table -> column in 0.1 -> column now."""

VALUES: Mapping[str, Mapping[str, Mapping[str, Mapping[str, str]]]] = {
    "trace": {
        "links": {
            "statistic": {"cut_share": "intervention_share"},
            "null_name": {"random_twin": "random_init"},
            "intervened": {"not cut": "no intervention"},
        }
    }
}
"""Kind of run -> table -> column now -> value in 0.1 -> value now."""

_EDITED = {"cut_sequences": "intervention_sequences", "cut_length": "intervention_length"}
_TRACE = {"cuts": "interventions", "twin": "random_init", "position": "target_position", **_EDITED}
CONFIG: Mapping[str, Mapping[str, str]] = {
    "trace": _TRACE,
    "isolate": {**_TRACE, "isolate_positions": "isolate_target_positions"},
    "amplify": {**_TRACE, "amplify_position": "amplify_target_position"},
    "ablate": _TRACE,
    "patch": {"key": "sink_position"},
}
"""Kind of run -> field of the configuration in 0.1 -> its name now."""
_METRIC = {"key": "sink_position", "keys": "positions"}


def current_table(table: pd.DataFrame, *, kind: str, name: str) -> pd.DataFrame:
    """A table of a run under the names of today."""
    columns = COLUMNS.get(kind, {}).get(name, {})
    there = set(table.columns)
    changes = {old: new for old, new in columns.items() if old in there and new not in there}
    if changes:
        table = table.rename(columns=changes)
    for column, values in VALUES.get(kind, {}).get(name, {}).items():
        if column in table.columns and bool(table[column].isin(list(values)).any()):
            table = table.assign(**{column: table[column].replace(dict(values))})
    return named(table, kind=kind, name=name)


class NamedTable(pd.DataFrame):
    """A table that names the new column if an old name is asked for.

    What pandas makes of it, a selection for example, is an ordinary data frame.
    """

    _metadata = ["old_columns"]  # noqa: RUF012  # pandas wants a list
    old_columns: Mapping[str, str]

    def __getitem__(self, key: Any) -> Any:
        """A column, or rows, as of any data frame.

        Raises:
            KeyError: there is no such column; an old name's message has the new one.
        """
        try:
            return super().__getitem__(key)
        except KeyError:
            for name in [key] if isinstance(key, str) else key if isinstance(key, list) else []:
                if isinstance(name, str) and name not in self.columns and name in self.old_columns:
                    raise KeyError(
                        f"the column {name!r} of 0.1 is now {self.old_columns[name]!r}; the table has "
                        f"{', '.join(map(str, self.columns))}"
                    ) from None
            raise


def named(table: pd.DataFrame, *, kind: str, name: str) -> pd.DataFrame:
    """The table as a ``NamedTable`` if any of its columns had another name in 0.1; else the table itself."""
    columns = COLUMNS.get(kind, {}).get(name)
    if not columns:
        return table
    shown = NamedTable(table)
    shown.old_columns = dict(columns)
    return shown


def current_record(record: dict[str, Any]) -> dict[str, Any]:
    """The content of run.json under the names of today."""
    kind = record["kind"]
    config = {CONFIG.get(kind, {}).get(name, name): value for name, value in record["config"].items()}
    if kind == "patch" and isinstance(config.get("by"), list):
        config["by"] = [_PATCH.get(name, name) for name in config["by"]]
    if kind == "sweep" and isinstance(config.get("metrics"), list):
        config["metrics"] = [_current_metric(one) for one in config["metrics"]]
    provenance = dict(record["provenance"])
    if "bos_arm" in provenance:
        provenance["bos_condition"] = provenance.pop("bos_arm")
    if isinstance(seeds := provenance.get("seeds"), dict) and "twin" in seeds:
        provenance["seeds"] = {"random_init" if name == "twin" else name: seed for name, seed in seeds.items()}
    return record | {"config": config, "provenance": provenance}


def _current_metric(metric: Any) -> Any:
    """A metric of a sweep; ``holds`` are the values that its function was made with, by name."""
    if not isinstance(metric, dict):
        return metric
    found = {_METRIC.get(name, name): value for name, value in metric.items()}
    if isinstance(found.get("holds"), dict):
        found["holds"] = {_METRIC.get(name, name): value for name, value in found["holds"].items()}
    return found
