"""What a result of patching says when it is printed."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from lenses import speaking

from sink_lens.edits import metrics
from sink_lens.errors import InputError
from sink_lens.patching import attribution_patch, patch, path_patch
from sink_lens.patching.config import PatchConfig
from sink_lens.records import read_run
from sink_lens.report.html import page_content
from tests.tiny_families import tiny

PAIR = ([[5, 6, 7, 8]], [[5, 9, 7, 8]])


def test_a_result_is_printed_in_at_most_three_lines_with_its_largest_effect(tmp_path):
    lens = tiny("llama")
    result = patch(
        lens,
        *map(torch.tensor, PAIR),
        metric="loss",
        controls=0,
        out=tmp_path / "run",
        progress=False,
    )
    top = result.strongest(1).iloc[0]
    assert len(repr(result).splitlines()) == 3
    assert f"{top['effect']:.4g}" in repr(result)
    assert f"layer {top['layer']}, position {top['position']}" in result.headline
    assert str(tmp_path / "run") in repr(result)
    assert result.report() == tmp_path / "run" / "report.html"
    run = read_run(tmp_path / "run")
    assert len(repr(run).splitlines()) == 1
    assert "patch (finished)" in repr(run)


def test_a_headline_names_the_largest_effect_that_is_shown_and_copies_are_told(caplog):
    pairs = [torch.tensor(one * 3) for one in PAIR]
    result = patch(tiny("llama"), *pairs, metric="loss", controls=0, progress=False)

    def of(ends, p):
        rows = result.rows.assign(ci_low=ends, ci_high=ends, corrected_p=p)
        return replace(result, rows=rows).headline

    assert "2 of 3 pairs of prompts are copies" in caplog.text
    first, second = result.strongest(2)["effect"]
    least = np.where(result.rows["effect"] == first, 1.0, 0.01)
    assert f"largest effect is {second:.4g}" in of(1.0, least)
    for ends, p in ((np.nan, np.nan), (1.0, 0.0)):  # one sequence has no interval
        assert f"largest effect is {first:.4g}" in of(ends, p)
    assert "No patch is shown" in of(1.0, 1.0)
    assert "No patch is shown" in of(0.0, 0.0)
    undefined = replace(result, rows=result.rows.assign(effect=np.nan, ci_low=np.nan)).headline
    assert undefined.endswith("\nNo patch has a defined effect.")


@pytest.mark.parametrize(
    ("answers", "named"), [((5, 6), "(5 − 6)"), (([5, 7, 9], [6, 8, 10]), ""), (([5], 6), "")]
)
def test_a_title_names_answers_that_are_the_same_for_all_pairs(tmp_path, answers, named):
    pairs = [torch.tensor(one * 3) for one in PAIR]
    correct, incorrect = answers
    run = patch(
        tiny("llama"), *pairs, correct=correct, incorrect=incorrect, controls=0, progress=False
    ).save(tmp_path / "run")
    title = page_content(read_run(run)).title
    assert "logit difference" in title
    assert named in title
    assert "[5" not in title


def test_a_result_without_a_folder_has_no_report():
    result = patch(
        tiny("llama"), *map(torch.tensor, PAIR), metric="loss", controls=0, progress=False
    )
    with pytest.raises(InputError, match="folder"):
        result.report()


def test_approximations_and_paths_are_printed_in_one_line_each():
    lens, pair = tiny("llama"), [*map(torch.tensor, PAIR)]
    assert "to first order" in repr(attribution_patch(lens, *pair, metric="loss"))
    paths = path_patch(
        lens, *pair, sender=("z", 0, 0), receiver=("q", 1, 0), metric=metrics.loss(), progress=False
    )
    assert len(repr(paths).splitlines()) == 1


def test_a_page_of_approximations_says_what_they_are(tmp_path):
    pair = [torch.tensor(one) for one in PAIR]
    found = attribution_patch(tiny("llama"), *pair, metric="loss")
    run = read_run(found.save(tmp_path / "run"))
    part, best = page_content(run), found.strongest(1).iloc[0]
    assert "to first order" in part.title
    assert f"layer {best['layer']}, position {best['position']}" in part.title
    assert any("approximated to first order, not patched" in said for said in part.headline)
    page = found.report(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "To first order, each cell" in page
    assert "Run again" not in page


def test_a_patch_without_a_change_says_so():
    with pytest.warns(UserWarning, match="the same resid_pre"):
        result = patch(
            tiny("llama"), *map(torch.tensor, PAIR), metric="loss", positions=[0], progress=False
        )
    assert "No patch changed anything" in result.headline
    assert "largest" not in result.headline


def test_a_headline_says_the_token_the_positions_and_bos():
    lens, how = speaking(), {"metric": metrics.loss(), "controls": 0, "progress": False}
    stream = patch(lens, "the cat and", "the bat and", bos="with", **how)
    (row,) = stream.differences.to_dict("records")
    assert f"position {row['position']} {row['clean'].replace(' ', '·')}/" in stream.headline
    assert ", with BOS:" in stream.headline
    heads = {"site": "z", "by": ("layer", "head")}
    for positions, said in (
        (None, "all positions"),
        ([-1], "position -1"),
        ([1, 2], "positions 1-2"),
    ):
        found = patch(
            lens, "the cat and", "the bat and", bos="without", positions=positions, **heads, **how
        )
        assert f", {said}." in found.headline
        assert ", without BOS:" in found.headline


def test_a_page_names_no_prompts_that_were_not_run(tmp_path):
    lens, how = speaking(), {"out": tmp_path / "run", "progress": False}
    config = PatchConfig(clean=("the cat and",), corrupted=("the bat and",), metric="loss")
    patch(lens, "x y z", "x x z", config=config, controls=0, **how)
    run = read_run(tmp_path / "run")
    assert "cat" not in str([page_content(run).headline, run.config])


def test_patches_behind_the_metric_are_not_said_to_be_of_equal_prompts(tmp_path):
    pairs, how = [torch.tensor(one) for one in PAIR], {"metric": metrics.sink_mass(0, layers=[0])}
    found = patch(
        tiny("llama"),
        *pairs,
        by=("layer",),
        controls=0,
        out=tmp_path / "run",
        progress=False,
        **how,
    )
    near = attribution_patch(tiny("llama"), *pairs, by=("layer",), **how)
    assert found.frame["changed"].tolist() == near.frame["changed"].tolist() == [True, False, False]
    said = " ".join(page_content(read_run(tmp_path / "run")).headline)
    assert "2 patches changed nothing" in said
    assert "the two prompts are the same there" not in said


def test_the_stream_of_a_headline_is_carried_by_the_rule_of_the_page(tmp_path):
    lens, pair = tiny("llama"), [torch.tensor(one) for one in PAIR]
    result = patch(lens, *pair, metric="loss", controls=0, progress=False)
    share = result.rows["position"].eq(1) * 0.9
    rows = result.rows.assign(
        normalised_effect=share, effect=share, corrected_p=0.001, ci_low=share, ci_high=share
    )
    last = rows["layer"].max()
    assert (
        f"is carried at position 1 <6>/<9> up to layer {last} (90%)"
        in replace(result, rows=rows).headline
    )
    assert "is carried" not in replace(result, rows=rows.assign(corrected_p=0.5)).headline
    zeroed = patch(lens, *pair, metric="loss", put="zero", controls=0, progress=False)
    assert "is carried" not in replace(zeroed, rows=rows).headline  # zeros carry nothing
    run = read_run(replace(zeroed, rows=rows).save(tmp_path / "run"))
    assert "is carried" not in page_content(run).title
