"""The result of a circuit in sentences."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ..text import (
    as_text,
    capitalise,
    join_and,
    name_in_words,
    node_label,
    percent,
    plural,
    safe_line,
)
from .config import AT_MOST, CARRIES, SIZES
from .methods import METHODS

_CARRIED = {
    "resample": "what they carry in the corrupted prompt",
    "zero": "nothing",
    "mean_ordinary": "the mean over ordinary tokens",
    "mean_all": "the mean over all tokens",
    "mean_aligned": "the mean at the same position",
}
"""Ablation -> what an edge outside of the circuit carries."""
_OFF = 0.1
"""Error of the scores' sum, and median error of a pair's, above which edges are not to be ranked."""
_CARRY = "at least 80%, by the lower end of the interval, and at most 120%"
_NO_SIZE = f"No size below all edges is enough: it and all larger ones must keep {_CARRY}."
BOUNDS_SOMETHING = 0.5
"""An upper bound is said if it is at most this share of all."""


def circuit_sentences(summary: pd.DataFrame, *, sizes: Sequence[float] = SIZES) -> tuple[str, ...]:
    row = summary.to_dict("records")[0]
    sentences = [_faithfulness_sentence(row)]
    if not are_scores_complete(row):
        at_sink = " The sink's position can be the cause; resample, or freeze the sink." * bool(
            row["sink_share"] > 0
        )
        sentences.append(
            "Do not rank edges by these scores: they should sum to the difference of the metric, and sum to "
            f"{percent(row['completeness'])} of it (error by pair: median {percent(row['completeness_error_median'])})."
            f" Ask for more points.{at_sink}"
        )
    sentences += _rule_sentences(row)
    if np.isfinite(swapped := row.get("swapped_faithfulness", np.nan)):
        sentences.append(
            "With a random tenth of its edges swapped for random ones between its own nodes, it keeps "
            f"{percent(swapped)}."
        )
    sentences += _sink_sentences(row)
    if np.isfinite(row["rank_correlation"]):
        sentences.append(
            f"Scores and real patches of single edges have a rank correlation of {as_text(row['rank_correlation'])}; "
            f"scores miss {percent(row['missed'])} of the summed effect."
        )
    if row["patched_nodes"] > 0:
        sentences.append(_node_sentences(row))
    sentences.append(
        f"{row['stable_edges']} of its edges are in at least 95% of 1,000 bootstraps over pairs; the circuits of two "
        f"halves of the pairs have {percent(row['jaccard_halves'])} of all their edges in common."
    )
    if row["core_edges"] >= 0:
        sentences.append(_core_sentences(row))
    carried = _CARRIED.get(str(row["ablation"]), safe_line(row["ablation"]))
    all_of_it = row["ablation"] == "resample" and row["frozen"] < 0
    replaced = "every edge" if all_of_it else "the input alone"
    frozen = f", but at position {row['frozen']}, which keeps its clean values" * (
        row["frozen"] >= 0
    )
    method = safe_line(row["method"]).upper()
    by = f"Its edges were chosen by {method} on {row['chosen_on']}"
    by = by if row["chosen_on"] else f"It was given, and scored by {method} on all"
    sentences += [
        f"{by} of {row['pairs']} pairs; other edges carry {carried} instead{frozen}.",
        f"{capitalise(name_in_words(str(row['metric'])))} is {as_text(row['clean'])} in clean runs and "
        f"{as_text(row['corrupted'])} with {replaced} replaced.",
    ]
    if _has_integrated_scores(row):
        sentences.append(
            f"The edges out of the input sum to {percent(row['completeness'])} of that difference "
            f"(error by pair: median {percent(row['completeness_error_median'])}, largest "
            f"{percent(row['completeness_error_largest'])}; {as_text(row['steps_mean'])} integration points per pair)."
        )
    if is_gap_clear(row) and np.isfinite(row["cpr"]):
        sentences.append(_areas_sentence(row, sizes=sizes))
    if np.isfinite(row["left_sum"]):
        sentences.append(
            f"EAP-IG's own left sum, at the initial number of points, gives {percent(row['left_sum'])} on "
            f"{plural(int(row['left_pairs']), 'pair')}."
        )
    outside = row["all_edges"] - row["edges"]
    if row["outside_sampled"] > 0 and row["outside_at_most"] <= BOUNDS_SOMETHING * outside:
        sentences.append(
            f"We patched a sample of {plural(row['outside_sampled'], 'edge')} outside the circuit: "
            f"{row['outside_over']} {'does' if row['outside_over'] == 1 else 'do'} more than its weakest edge "
            f"({as_text(row['weakest'])}). So at most {row['outside_at_most']:,} of all {outside:,} edges outside do, "
            "at 95% confidence."
        )
    return tuple(sentences)


def brief_sentences(row: Mapping[str, Any]) -> list[str]:
    if row["judged_on"]:
        return [_faithfulness_sentence(row), *_rule_sentences(row)]
    return [
        f"The circuit has {edge_count_text(row)}. All pairs chose them, and none is left to judge them on: "
        f"give more pairs{', or edges=...' * (row['rule'] == 'unjudged')}.",
        *_left_out_sentences(row),
    ]


def are_scores_complete(row: Mapping[str, Any]) -> bool:
    """Check that the scores sum to the metric's difference within 10%; True for methods without such a sum."""
    if not _has_integrated_scores(row):
        return True
    return not any(
        abs(off) > _OFF for off in (row["completeness"] - 1, row["completeness_error_median"])
    )


def _has_integrated_scores(row: Mapping[str, Any]) -> bool:
    method = METHODS.get(row["method"])
    return method is not None and method.integrates


def _node_sentences(row: Mapping[str, Any]) -> str:
    unseen = row["unseen_nodes"].split() if isinstance(row["unseen_nodes"], str) else []
    of_zero = row["ablation"] == "zero"
    if not unseen:
        doubt = (
            " Against zero that is no sign of a right circuit: of 14 without such nodes, 5 were right."
            * of_zero
        )
        return (
            f"Each of the {row['patched_nodes']} nodes was really patched, and gradients miss none of them: no patch "
            "that does 5% of what all edges do has the other sign than its edges' scores, or ten times their summed "
            f"magnitude.{doubt}"
        )
    if of_zero:
        doubt = " Against zero that is no sign of a wrong circuit: of 28 right ones in the zoo, 23 have such nodes."
    else:
        doubt = " One gradient (eap) misses nodes in many right circuits too; use eap-ig." * (
            row["method"] == "eap"
        )
    return (
        f"Do not believe the circuit at {join_and(map(node_label, unseen))}: a real patch of the whole node does at "
        "least 5% of what all edges do, and has the other sign than its edges' scores or ten times their summed "
        "magnitude. Gradients do not see "
        f"such edges, for example if two parts cancel before a threshold. Score them with exact.{doubt}"
    )


def _sink_sentences(row: Mapping[str, Any]) -> list[str]:
    kept, share = row["without_sink_faithfulness"], row["sink_share"]
    if not np.isfinite(kept) or share == 0:
        return []
    scores = (
        f"{percent(share)} of the scores, and {percent(row['sink_share_top'])} of the 200 largest,"
        * (share > 0)
    )
    said = f"{scores} are at the sink's position. " if scores else ""
    said += f"All edges but those at the sink's position keep {faithfulness_text(row, 'without_sink_')}."
    if kept < CARRIES and not str(row["metric"]).startswith("sink mass"):
        said += (
            " That is below 80%: much of what a circuit keeps is then the sink, which every text needs, and not the "
            "task. Resampling leaves the sink as it is, and so does the option freeze."
        )
    return [said]


def _core_sentences(row: Mapping[str, Any]) -> str:
    together = f", and {row['together_edges']} can go together at no loss, since they cancel"
    together = together if row["together_edges"] > 0 else ""
    alone = (
        f" The core alone keeps {faithfulness_text(row, 'core_')}."
        if np.isfinite(row["core_faithfulness"])
        else ""
    )
    return (
        f"{_edges_text(row['core_edges'])} core: in at least 95% of the bootstraps under every ablation and "
        f"template. Real patches confirm {row['confirmed_edges']} of them (at least 1% of what all edges do){together}."
        f"{alone} {_edges_text(row['undecided_edges'])} undecided: in 95% of the bootstraps under only some of these. "
        f"{_edges_text(row['contingent_edges'])} contingent: in some circuit, but in 95% of the bootstraps under none "
        "of these."
    )


def _edges_text(n: int) -> str:
    return f"{plural(n, 'edge')} {'is' if n == 1 else 'are'}"


def faithfulness_text(row: Mapping[str, Any], name: str = "") -> str:
    f, low, high = (float(row[f"{name}faithfulness{end}"]) for end in ("", "_low", "_high"))
    return f"{percent(f)}{f' [{percent(low)}, {percent(high)}]' * bool(np.isfinite(low))}"


def edge_count_text(row: Mapping[str, Any]) -> str:
    return f"{row['edges']:,} of {row['all_edges']:,} edges ({_share_text(row['edges'] / row['all_edges'])})"


def _faithfulness_sentence(row: Mapping[str, Any]) -> str:
    if row["judged_on"] < 2:
        pairs = 2 if row["rule"] == "given" else 4
        return f"Faithfulness is undefined: one pair alone has no interval. Give {pairs} pairs or more."
    gap = f"{as_text(row['gap'])} [{as_text(row['gap_low'])}, {as_text(row['gap_high'])}]"
    if not is_gap_clear(row):
        return (
            f"Faithfulness is undefined: on {row['judged_on']} pairs, the metric differs by {gap} between all edges "
            "and none, which cannot be told from 0."
        )
    given = row["rule"] == "given"
    judges = (
        f"on all {row['judged_on']} pairs"
        if given
        else f"on {row['judged_on']} pairs that were not used to choose it"
    )
    return (
        f"The circuit has {edge_count_text(row)} and keeps {faithfulness_text(row)} of what all edges add to the "
        f"{name_in_words(str(row['metric']))}, {gap}, {judges}. "
        f"All other edges, without it, keep {faithfulness_text(row, 'without_')}."
    )


def _areas_sentence(row: Mapping[str, Any], *, sizes: Sequence[float]) -> str:
    """Return a sentence with CPR and CMD, or with areas over ``sizes`` if these do not span all shares."""
    least, most = min(sizes), max(sizes)
    cpr, cmd, cpr_log, cmd_log = (
        as_text(row[name]) for name in ("cpr", "cmd", "cpr_log", "cmd_log")
    )
    if most < 1 or least > SIZES[3]:  # CPR and CMD are areas from 0 to 1
        return (
            f"From {100 * least:.3g}% to {100 * most:.3g}% of the edges, the sizes of the run, the area under "
            f"faithfulness is {cpr} and that of its distance from 1 is {cmd}; averaged over the logarithm of the size, "
            f"they are {cpr_log} and {cmd_log}."
        )
    return (
        f"Averaged over sizes, faithfulness is {cpr} (CPR) and its distance from 1 is {cmd} (CMD); over the logarithm "
        f"of the size, they are {cpr_log} and {cmd_log}."
    )


def _share_text(share: float) -> str:
    return percent(share) if share >= 0.1 else f"{100 * share:.2g}%"


def _rule_sentences(row: Mapping[str, Any]) -> list[str]:
    if not is_gap_clear(row):
        return _left_out_sentences(row)
    said = ""
    if "share_at_80" in row:
        said = f" {_NO_SIZE}"
        if np.isfinite(share := row["share_at_80"]):
            said = f" From {_share_text(share)} of the edges on, circuits keep {_CARRY}."
    told = {
        "smallest": f"All circuits of this size or larger that were run keep {_CARRY}; it is the smallest such size.",
        "none": f"{_NO_SIZE} So its size is the default one.",
        "asked": f"Its size was asked for.{said}",
        "given": "It was given; as many of the largest scores, judged on the half of the pairs that did not choose "
        f"them, keep {faithfulness_text(row, 'as_many_')}.{said}"
        if np.isfinite(row.get("as_many_faithfulness", np.nan))
        else "It was given.",
        "threshold": f"It has all scores above the threshold.{said}",
    }[row["rule"]]
    if row["seen"]:
        told += " It was found on these same pairs, which flatters it: judge it on others, such as another seed's."
    if row.get("most_kept", 0) > AT_MOST:
        size, kept = _share_text(row["most_kept_at"]), percent(row["most_kept"])
        told += f" Faithfulness overshoots: circuits of {size} keep {kept}."
    return [told, *_left_out_sentences(row)]


def _left_out_sentences(row: Mapping[str, Any]) -> list[str]:
    if (lost := row["asked_edges"] - row["edges"]) <= 0:
        return []
    edges = (
        "its {:,} edges that were given"
        if row["rule"] == "given"
        else "the {:,} edges that were chosen"
    )
    on, left = ("lies", "is") if lost == 1 else ("lie", "are")
    return [
        f"{lost:,} of {edges.format(row['asked_edges'])} {on} on no path from the input to the metric and {left} left "
        "out."
    ]


def is_gap_clear(row: Mapping[str, Any]) -> bool:
    return row["gap_low"] > 0 or row["gap_high"] < 0
