"""The page of a sweep of patches between two prompts."""

from matplotlib.figure import Figure

from sink_lens.errors import RunError
from sink_lens.records import Run
from sink_lens.report.columns import by_size, flags, need
from sink_lens.report.findings import optional
from sink_lens.report.heatmap import patch_map
from sink_lens.report.pages import Drawn, Listed, Page
from sink_lens.report.tables import Table, more, shown_table
from sink_lens.report.words import number, token, visible

_BY = ("layer", "pos", "head_index", "src_pos", "neuron")


def _texts(run: Run) -> dict[int, str]:
    """Position -> what the two prompts have there, where they differ."""
    table = optional(run, "differences", ["position", "clean", "corrupted"])
    if table is None:
        return {}
    rows = table.drop_duplicates("position").to_dict("records")
    return {int(row["position"]): f"{token(row['clean'])}/{token(row['corrupted'])}" for row in rows}


def _headline(run: Run) -> list[str]:
    table = by_size(need(run, "patches", columns=["effect", "changed"]), "effect")
    said = [f"{len(table)} places of {visible(run.config.get('site', 'a site'))} were patched, one at a time."]
    if len(table):
        best = table.to_dict("records")[0]
        where = ", ".join(f"{name} {number(best[name])}" for name in _BY if name in table.columns)
        share = f", {best['normalised_effect']:.0%} of the way" if "normalised_effect" in table.columns else ""
        said.append(f"Largest effect at {where}: {number(float(best['effect']))}{share}.")
    same = int((~flags(table, "changed")).sum())
    if same:
        said.append(f"{same} patches changed nothing: the two prompts are the same there.")
    return said


def _map(run: Run) -> tuple[str, Figure]:
    table = need(run, "patches", columns=["effect"])
    if not len(table):
        raise RunError("the table 'patches' has no rows. Run again to see it.")
    value = "normalised_effect" if "normalised_effect" in table.columns else "effect"
    by = [name for name in _BY if name in table.columns]
    by = [name for name in by if len(set(table[name].tolist())) > 1] or by[:1]
    see = (
        "Each cell is a place that was given what it holds in the other prompt; red moves the metric towards it, blue "
        "away. 1 restores it whole." if value == "normalised_effect" else
        "Each cell is a place that was given what it holds in the other prompt; red raises the metric, blue lowers it."
    )  # fmt: skip
    return see, patch_map(table, by=by, value=value, labels=_texts(run))


def _patch_table(run: Run) -> tuple[str, Table]:
    table = by_size(need(run, "patches", columns=["effect"]), "effect")
    heads = {str(name): str(name).replace("_", " ") for name in table.columns}
    return "The patches, the largest effect first." + more(len(table), "patches"), shown_table(table, heads)


def _difference_table(run: Run) -> tuple[str, Table]:
    table = need(run, "differences", columns=["sequence", "position", "clean", "corrupted"])
    heads = {name: name for name in ("sequence", "position", "clean", "corrupted")}
    shown = table.assign(
        clean=[token(one) for one in table["clean"]], corrupted=[token(one) for one in table["corrupted"]]
    )
    return "Where the two prompts differ (a dot is a space)." + more(len(table), "differences"), shown_table(
        shown, heads
    )


PATCH = Page(
    title=lambda run: (
        f"Patching {visible(run.config.get('site', 'activations'))}, {visible(run.config.get('direction', ''))}"
    ),
    headline=_headline,
    figures=(Drawn(key="map", title="Where it is decided", make=_map, data=lambda run: run.tables["patches"]),),
    tables=(
        Listed(key="patch-table", title="Strongest patches", make=_patch_table),
        Listed(key="difference-table", title="The prompts", make=_difference_table),
    ),
)
