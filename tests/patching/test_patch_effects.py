"""Patches have intervals over pairs and random parts as controls, take any edit, and are kept in a folder."""

import functools
from typing import get_args

import numpy as np
import pytest
import torch
from lenses import lens_of
from rounding import assert_close

from sink_lens import (
    TokenBatch,
    capture,
    direct_logit_attribution,
    edits,
    generate,
    patching,
    run_with,
    sweep,
    wrap,
)
from sink_lens.edits import metrics
from sink_lens.edits.named_edits import KINDS
from sink_lens.engine.engine import Engine
from sink_lens.errors import InputError, RunError
from sink_lens.models.tiny import planted, tiny_tokenizer
from sink_lens.patching.config import Put
from sink_lens.patching.parts import draw_random_parts, parts_to_patch
from sink_lens.records import read_run
from sink_lens.report.html import page_content
from sink_lens.stats import paired_differences
from sink_lens.sweeps import EditGrid, cell_of

N, T = 4, 10
METRIC = metrics.logit_difference(5, 7)


@functools.cache
def lens():
    return wrap(planted().model, tokenizer=tiny_tokenizer(adds_bos=True))


@functools.cache
def pair():
    clean = torch.randint(3, 60, (N, T), generator=torch.Generator().manual_seed(0))
    clean[:, 0] = 1
    corrupted = clean.clone()
    corrupted[:, 4] = torch.arange(N) + 60
    return TokenBatch.from_tensor(clean), TokenBatch.from_tensor(corrupted)


def patched(**options):
    options = {"metric": METRIC, "layers": [1, 2], "progress": False} | options
    return patching.patch(lens(), *pair(), **options)


def test_an_effect_has_its_interval_over_pairs_and_random_parts_beside_it():
    result = patched()
    frame = result.frame
    effects = (result.values - result.baselines[0]).numpy()
    assert frame["baseline"].unique() == pytest.approx(float(result.baselines[0].mean()))
    assert frame["effect"].to_numpy() == pytest.approx(effects.mean(1))
    wanted = paired_differences(
        result.values.numpy(), result.baselines[:1].numpy(), generator=np.random.default_rng(0)
    )
    assert frame["ci_low"].to_numpy() == pytest.approx([one.low for one in wanted])
    assert frame["ci_high"].to_numpy() == pytest.approx([one.high for one in wanted])
    assert frame["n_controls"].eq(frame["changed"] * 5).all()
    grid = parts_to_patch(
        lens(), "resid_pre", by=("layer", "position"), n_positions=T, layers=[1, 2]
    )
    for row, part in enumerate(grid):
        if not frame["changed"][row]:
            continue
        drawn = draw_random_parts(part, sizes=(T, 48), shortest=T, draws=5, seed=0)
        places = [T * (part.layers[0] - 1) + one.indices_by_axis[0][0] for one in drawn]
        assert row not in places
        assert frame["control_effect"][row] == pytest.approx(effects[places].mean(), abs=1e-6)
        assert frame["over_control"][row] == pytest.approx(
            effects[row].mean() - effects[places].mean(), abs=1e-6
        )
    assert patched(controls=0).frame["n_controls"].eq(0).all()


def test_controls_are_other_heads_units_or_positions_of_the_layer_and_none_of_its_own():
    for by, site, sizes, axis in (
        (("layer", "head"), "z", (T, 4, 12), 1),
        (("layer", "position", "head"), "z", (T, 4, 12), 1),
        (("unit",), "neurons", (T, 80), 1),
    ):
        for part in parts_to_patch(lens(), site, by=by, n_positions=T, layers=[1])[:12]:
            drawn = draw_random_parts(part, sizes=sizes, shortest=T, draws=3, seed=0)
            assert len(drawn) == 3
            for one in drawn:
                chosen, own = one.indices_by_axis, part.indices_by_axis
                assert not set(chosen[axis]) & set(own[axis])
                assert [*chosen[:axis], *chosen[axis + 1 :]] == [*own[:axis], *own[axis + 1 :]]
    (whole,) = parts_to_patch(lens(), "z", by=(), n_positions=T, layers=[1])
    assert draw_random_parts(whole, sizes=(T, 4, 12), shortest=T, draws=3, seed=0) == []


def test_one_pair_has_no_interval():
    clean, corrupted = (TokenBatch.from_tensor(one.tokens[:1]) for one in pair())
    frame = patching.patch(
        lens(), clean, corrupted, metric=METRIC, layers=[1], progress=False
    ).frame
    assert frame["ci_low"].isna().all()
    assert frame["over_low"].isna().all()
    assert frame["control_effect"].notna().eq(frame["changed"]).all()


@pytest.mark.parametrize("put", ["a function", "scale", "set", "mean_ordinary", "mean_aligned"])
def test_a_part_takes_any_edit(put):
    run = pair()[1]  # denoising patches the corrupted run
    make = {
        "a function": lambda site, **where: edits.scale(site, -1.0, **where),
        "scale": lambda site, **where: edits.scale(site, 3.0, **where),
        "set": lambda site, **where: edits.set_to(site, 3.0, **where),
        "mean_ordinary": functools.partial(edits.mean_ordinary, lens(), run),
        "mean_aligned": functools.partial(edits.mean_aligned, lens(), run),
    }[put]
    options = (
        {"put": make}
        if put == "a function"
        else {"put": put} | ({"factor": 3.0} if put in ("scale", "set") else {})
    )
    found = patched(site="z", by=("layer", "head"), **options)
    for row, (layer, head) in enumerate(found.frame[["layer", "head"]].itertuples(index=False)):
        one = make("z", layers=[layer], heads=[head])
        wanted = METRIC.function(run_with(lens(), run, [one], logits=True)).double()
        torch.testing.assert_close(found.values[row], wanted, rtol=1e-4, atol=1e-4)
    assert found.frame["changed"].all()


def test_an_edit_by_name_is_every_kind_of_a_sweep_with_the_options_that_it_takes_and_no_others():
    assert set(get_args(Put)) == {"source", *KINDS} - {"add", "isolate", "amplify"}
    with pytest.raises(InputError, match="scale needs a factor"):
        patched(put="scale")
    with pytest.raises(InputError, match="zero takes no factor; leave it out"):
        patched(put="zero", factor=2.0)
    with pytest.raises(InputError, match="source takes no factor"):
        patched(factor=2.0)
    with pytest.raises(InputError, match=r"factor is 2\.0, which nothing reads here"):
        patched(site="z", put=edits.zero, factor=2.0)
    with pytest.raises(InputError, match="need a site with positions"):
        patched(site="pattern", by=("layer", "head"), put="mean_all")
    with pytest.raises(
        InputError, match="put into a part of 'z' is an edit of 'k'; need an edit of that site"
    ):
        patched(site="z", put=lambda site, **where: edits.zero("k"))
    with pytest.raises(InputError, match="leave out screen, or put"):
        patched(put="zero", screen=3)


def test_a_function_of_logits_is_a_metric():
    def difference(logits):
        return logits[:, -1, 5] - logits[:, -1, 7]

    by_hand, ours = patched(metric=difference), patched()
    assert_close(by_hand.values, ours.values)
    assert by_hand.metric == "difference"
    of_outcome = metrics.on_outcome(lambda run: run.logits[:, -1, 5])
    assert patched(metric=of_outcome).values.shape == (2 * T, N)


def test_a_metric_with_a_trained_direction_is_one():
    direction = torch.nn.Parameter(torch.arange(2.0))
    asked = {"metric": lambda logits: logits[:, -1, 5:7] @ direction, "progress": False}
    found = patched(controls=0, **asked)
    assert_close(found.values, patched(controls=0, metric=lambda x: x[:, -1, 6]).values)
    path = patching.path_patch(lens(), *pair(), sender=("z", 0), receiver=("q", 1), **asked)
    assert path.baseline == pytest.approx(found.baseline, abs=1e-6)


def test_words_are_tokens():
    tokenizer, texts = lens().tokenizer, ["x y", "y x"]
    first, second = (tokenizer.convert_tokens_to_ids(one) for one in ("!", "?"))
    tokens = TokenBatch.from_prompts(texts, tokenizer)
    run = run_with(lens(), tokens, logits=True)
    ids = metrics.logit_difference(first, second)
    words = metrics.logit_difference("!", "?", tokenizer)
    with pytest.raises(InputError, match="which has no prompt"):
        metrics.evaluate(words, run)
    assert torch.equal(words.on([tokens], None).function(run), ids.function(run))
    several = metrics.logit_difference(["!", "?"], ["?", "!"], tokenizer).on([tokens], None)
    assert torch.equal(several.function(run).abs(), ids.function(run).abs())
    other = TokenBatch.from_tensor(tokens.tokens.flip(0))
    found = patching.patch(
        lens(), tokens, other, metric=words, layers=[1], positions=[1], progress=False
    )
    assert found.metric == "logit difference (! − ?)"


def stop_at_the_second_block(monkeypatch):
    """Return a list that grows by each block, as it begins: the second one is interrupted."""
    map_block, blocks = Engine.map, []

    def stopping(self, block, take, **options):
        blocks.append(len(block.cells))
        if len(blocks) == 2:
            raise KeyboardInterrupt
        return map_block(self, block, take, **options)

    monkeypatch.setattr(Engine, "map", stopping)
    return blocks


def test_a_run_is_kept_and_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    whole = patched(out=tmp_path / "whole", batch_size=1)
    run = read_run(tmp_path / "whole")
    assert run.provenance["corrupted_sha256"] == pair()[1].hash
    assert list(run.tables["patches"]["effect"]) == pytest.approx(whole.frame["effect"].tolist())
    assert run.tables["values"]["value"].to_numpy() == pytest.approx(whole.values.flatten().numpy())
    two = {"out": tmp_path / "two", "batch_size": 1}
    n_blocks = len(list((tmp_path / "whole").glob("block-*.parquet")))
    assert n_blocks > 2
    blocks = stop_at_the_second_block(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        patched(**two)
    with pytest.raises(RunError, match="metric_name"):
        patched(**two, metric=metrics.sink_mass(0))
    again = patched(**two)
    assert torch.equal(again.values, whole.values)  # the same plan
    assert len(blocks) == 2 + n_blocks - 1 + 1  # one was there, and a patch of it is measured again
    assert again.folder == tmp_path / "two"
    with pytest.raises(RunError, match="finished"):
        patched(**two)


def test_without_out_nothing_is_written_until_a_result_is_saved_or_a_call_is_stopped(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    whole = patched(out=None, batch_size=1)
    assert list(tmp_path.iterdir()) == []
    assert len(str(whole).splitlines()) <= 3
    with pytest.raises(InputError, match="report"):
        whole.report()
    assert whole.report("page.html").is_file()
    assert (
        read_run(whole.save("saved")).tables["patches"]["effect"].tolist()
        == whole.frame["effect"].tolist()
    )
    stop_at_the_second_block(monkeypatch)
    with pytest.raises(KeyboardInterrupt) as stopped:
        patched(out=None, batch_size=1)
    (kept,) = (tmp_path / "runs").iterdir()
    assert f"out='runs/{kept.name}'" in stopped.value.__notes__[-1]
    assert torch.equal(patched(out=kept, batch_size=1).values, whole.values)


def test_a_run_with_a_metric_of_ones_own_is_captioned_with_its_name(tmp_path):
    def score(logits):
        return logits[:, -1, 7]

    for metric, name in (
        (score, "score"),
        (metrics.norm(0, layer=2), "norm of resid_post at position 0, layer 2"),
    ):
        patching.patch(lens(), *pair(), metric=metric, out=tmp_path / name, progress=False)
        part = page_content(read_run(tmp_path / name))
        assert name in part.title or name.capitalize() in part.title
        assert not any("sink mass at position 0" in said for said in [part.title, *part.headline])


@pytest.mark.filterwarnings("ignore:Position 5 is not the same place")
def test_pairs_without_a_patched_position_are_left_out_of_it():
    clean, corrupted = (
        (torch.tensor([[5, at, 7, 8, 9, other, 6, 4]] * 3)) for at, other in ((10, 11), (12, 13))
    )
    lengths = torch.tensor([8, 4, 8])
    both = [TokenBatch.from_tensor(one, lengths=lengths) for one in (clean, corrupted)]
    result = patching.patch(
        lens(), *both, metric="kl", layers=[1], positions=[1, 5], progress=False
    )
    alone = [TokenBatch.from_tensor(one[:1]) for one in (clean, corrupted)]
    long = patching.patch(lens(), *alone, metric="kl", layers=[1], positions=[1, 5], progress=False)
    assert result.frame["n"].tolist() == [3, 2]
    for name in ("baseline", "effect", "normalised_effect"):
        assert result.frame[name][1] == pytest.approx(long.frame[name][1], rel=1e-4)
    assert torch.equal(result.values[1].isnan(), lengths == 4)
    near = patching.attribution_patch(lens(), *both, metric="kl", layers=[1], positions=[1, 5])
    alike = patching.attribution_patch(lens(), *alone, metric="kl", layers=[1], positions=[1, 5])
    assert near.frame["n"].tolist() == [3, 2]
    assert near.frame["effect"][1] == pytest.approx(alike.frame["effect"][1], rel=1e-4)
    whole = patching.patch(lens(), *both, metric="kl", by=("layer",), progress=False)
    assert (whole.frame["n"] == 3).all()


def test_the_share_of_the_way_is_of_pairs_that_have_both_ends_and_of_no_rounding():
    whole = patched(metric=lambda logits: logits[:, -1, 5], controls=0)
    end = whole.baselines[1, 2]

    def holed(logits):  # undefined in the third clean prompt
        found = logits[:, -1, 5]
        return found.where((found - end).abs() > 1e-6, torch.nan)

    found, keep = patched(metric=holed, layers=[1], controls=0), [0, 1, 3]
    assert found.baselines[1].isnan().tolist() == [False, False, True, False]
    moved = (found.values - found.baselines[0])[:, keep].mean(1)
    span = (found.baselines[1] - found.baselines[0])[keep].mean()
    assert found.frame["normalised_effect"].to_numpy() == pytest.approx((moved / span).numpy())
    rounding = patched(metric=lambda logits: logits[:, -1].softmax(-1).sum(-1), controls=0)
    assert rounding.frame["effect"].abs().max() < 1e-6
    assert rounding.frame["normalised_effect"].isna().all()


# --- functions of one's own under the same name


def in_notebook(text):
    """The function f of a notebook."""
    found = {"__name__": "__main__", "edits": edits}
    exec(text, found)
    return found["f"]


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("def g(x): return x[:, -1, 5] * {}\ndef f(x): return g(x)", lambda f: {"metric": f}),
        (
            "def f(site, **where): return edits.scale(site, {}, **where)",
            lambda f: {"put": f, "site": "z"},
        ),
        (
            "def g(x): return x * {}\ndef f(x, at): return g(x)",
            lambda f: {"edits": edits.edit("z", f, layers=[1])},
        ),
    ],
    ids=["metric", "put", "edits"],
)
def test_a_stopped_run_does_not_go_on_with_a_function_that_was_redefined(
    tmp_path, monkeypatch, text, options
):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at_the_second_block(patch)
        patched(out=tmp_path / "a", batch_size=1, **options(in_notebook(text.format(2.0))))
    with pytest.raises(RunError, match="numbers of something else"):
        patched(out=tmp_path / "a", batch_size=1, **options(in_notebook(text.format(3.0))))
    again = patched(out=tmp_path / "a", batch_size=1, **options(in_notebook(text.format(2.0))))
    assert again.frame.equals(
        patched(out=tmp_path / "c", batch_size=1, **options(in_notebook(text.format(2.0)))).frame
    )


def test_a_layer_below_0_counts_from_the_last(tmp_path):
    own, tokens = (
        lens_of(),
        torch.randint(3, 300, (1, 6), generator=torch.Generator().manual_seed(0)),
    )
    assert set(capture(own, tokens, sites=["z"], layers=[-1, 0])) == {("z", 0), ("z", 2)}
    assert run_with(own, tokens, layers=[-2]).layers == (1,)
    part = {"layers": [-1], "positions": [2], "controls": 0}
    found = patching.patch(own, tokens, tokens.flip(1), metric="loss", progress=False, **part)
    assert found.frame["layer"].tolist() == [2]

    def everywhere(last, first):
        some = [
            edits.zero("z", layers=[last, first]),
            edits.mean_all(own, tokens, "z", layers=[last, first]),
        ]
        some += [edits.isolate([3], layers=[last])]
        some += [edits.scalar(own, layer=last, neurons=[1, 2], dimensions=[0], factor=9.0)]
        yield from (run_with(own, tokens, one).loss for one in some)
        yield own.bridge.run_with_hooks(
            tokens, fwd_hooks=edits.fwd_hooks(own, edits.zero("mlp_out", layers=[last]))
        )
        yield generate(own, tokens, edits.add("z", 9.0, layers=[last]), max_new_tokens=4).ids
        one = edits.scale("resid_post", 2.0, layers=[first])
        yield direct_logit_attribution(own, tokens, 5, edits=one).values
        asked = {
            "metric": "loss",
            "edits": edits.scale("z", 3.0, layers=[first]),
            "progress": False,
        }
        asked |= {"put": lambda site, **where: edits.zero(site, **{**where, "layers": [last]})}
        yield patching.patch(
            own, tokens, tokens.flip(1), **asked, **{**part, "layers": [last]}
        ).values
        ends = {
            "sender": ("z", first, 0),
            "receiver": ("q", last, 1),
            "metric": metrics.logit_difference(5, 7),
        }
        yield patching.path_patch(own, tokens, tokens.flip(1), **ends).frame["effect"].tolist()
        cells, out = [cell_of(edits.zero("z", layers=[first]), name="mine")], tmp_path / str(last)
        asked = {"metrics": metrics.sink_mass(0), "progress": False}
        yield sweep(own, cells, tokens=tokens, out=out, **asked).frame["effect"].tolist()
        for chosen in (first, [last, first], [[first, last]]):
            yield next(EditGrid(site="z", layers=chosen).specs(own, n_positions=6)).part

    for found, wanted in zip(everywhere(-1, -3), everywhere(2, 0), strict=True):
        assert torch.equal(found, wanted) if isinstance(found, torch.Tensor) else found == wanted
    for call in (
        lambda: edits.freeze("z", {-1: torch.zeros(1)}),
        lambda: edits.normalise({-1: torch.ones(4)}),
    ):
        with pytest.raises(InputError, match="need layers counted from 0 on"):
            call()
    for ask in (
        lambda: capture(own, tokens, sites=["z"], layers=[-4]),
        lambda: run_with(own, tokens, layers=[-4]),
    ):
        with pytest.raises(InputError, match="layer -4 does not exist; need 0 to 2"):
            ask()
