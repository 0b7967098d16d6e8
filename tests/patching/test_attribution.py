"""Attribution patching: a gradient that finite differences confirm, and an error that real patches measure."""

import pytest
import torch
from lenses import lens_of
from prompt_pairs import pair
from rounding import CLOSE

from sink_lens.data.tokens import from_tensor
from sink_lens.edits import metrics
from sink_lens.edits.constructors import edit
from sink_lens.edits.effect_table import are_shown
from sink_lens.edits.metrics import evaluate
from sink_lens.engine.forward import run_with
from sink_lens.errors import InputError
from sink_lens.models.load import wrap
from sink_lens.models.sites import sites_of
from sink_lens.patching import first_order
from sink_lens.patching.attribution import attribution_patch
from sink_lens.patching.patch import patch
from tests.tiny_families import TINY_FAMILIES, tiny

DIFFERENCE = metrics.logit_difference([5, 6], [7, 8])


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_the_gradient_is_that_of_finite_differences_at_every_site(family):
    lens, (clean, corrupted) = lens_of(family), pair()
    whole = family in ("llama", "gpt2", "gemma2", "gpt_neox")
    for site in sites_of(lens.family) if whole else ("scores", "z", "mlp_out"):
        found = attribution_patch(
            lens, clean, corrupted, site=site, by=("layer",), layers=[1], metric=DIFFERENCE
        )
        values = found.runs.given[(site, 0 if site == "final" else 1)]

        def moved(step, *, site=site, values=values):
            layers = None if site == "final" else [1]
            one = edit(
                site,
                lambda x, at: torch.where(values == x, x, x + step * (values - x)),
                layers=layers,
            )
            return float(
                evaluate(
                    DIFFERENCE, run_with(lens, corrupted, one, layers=(2,), logits=True)
                ).mean()
            )

        slope = (moved(0.002) - moved(-0.002)) / 0.004
        assert found.frame["effect"].item() == pytest.approx(slope, rel=0.05, abs=3e-3), site


@pytest.mark.parametrize(
    "metric",
    [
        metrics.sink_mass(1),
        metrics.loss(),
        metrics.norm(3, layer=2),
        metrics.dominance(3, layer=1),
        metrics.on_batch(metrics.on_outcome(lambda run: run.loss.mean())),
        None,  # the divergence, away from its minimum
    ],
)
def test_every_metric_can_be_approximated(metric):
    lens, (clean, corrupted) = lens_of(), pair()
    metric = metric or metrics.kl_to(run_with(lens, clean, logits=True).logits)
    found = attribution_patch(lens, clean, corrupted, site="resid_pre", metric=metric)
    assert found.frame["effect"].abs().max() > 0
    assert (found.frame.loc[found.frame["position"] < 2, "effect"] == 0).all()


def test_it_is_exact_where_the_metric_is_linear():
    lens, (clean, corrupted) = lens_of(), pair()
    found = attribution_patch(lens, clean, corrupted, site="final", metric=DIFFERENCE)
    check = found.sample(5, generator=torch.Generator().manual_seed(0))
    assert check.mean_error < CLOSE * max(1.0, check.mean_effect)
    assert check.same_sign_frac == 1


def test_the_cells_of_a_head_add_up_to_the_whole():
    lens, (clean, corrupted) = lens_of(), pair()
    parts = attribution_patch(
        lens, clean, corrupted, site="z", by=("layer", "position", "head"), metric=DIFFERENCE
    )
    whole = attribution_patch(lens, clean, corrupted, site="z", by=("layer",), metric=DIFFERENCE)
    summed = parts.frame.groupby("layer")["effect"].sum().tolist()
    assert summed == pytest.approx(whole.frame["effect"].tolist(), abs=1e-5)


def test_the_sample_is_compared_with_real_patches():
    lens, (clean, corrupted) = lens_of(), pair()
    found = attribution_patch(
        lens, clean, corrupted, site="z", by=("layer", "position", "head"), metric=DIFFERENCE
    )
    check = found.sample(12, generator=torch.Generator().manual_seed(3))
    again = found.sample(12, generator=torch.Generator().manual_seed(3))
    assert check.frame.equals(again.frame)
    assert check.n == 12
    assert list(check.frame.columns) == [
        "layer",
        "position",
        "head",
        "approximation",
        "effect",
        "error",
    ]
    assert (check.frame["error"] == check.frame["approximation"] - check.frame["effect"]).all()
    ranks = check.frame[["approximation", "effect"]].rank()
    assert check.rank_correlation == pytest.approx(ranks.corr().iloc[0, 1])
    assert "against 12 real patches" in check.sentence


def test_padding_and_undefined_sequences_are_left_out():
    lens, (clean, corrupted) = lens_of(), pair()
    lengths = torch.tensor([7, 1])  # a sequence of one token has no loss
    batches = (from_tensor(tokens, lengths=lengths) for tokens in (clean, corrupted))
    found = attribution_patch(lens, *batches, site="z", by=("layer",), metric=metrics.loss())
    alone = attribution_patch(
        lens, clean[:1], corrupted[:1], site="z", by=("layer",), metric=metrics.loss()
    )
    assert found.frame["n"].tolist() == [1, 1, 1]
    assert found.frame["effect"].tolist() == pytest.approx(alone.frame["effect"].tolist(), abs=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda logits: logits.detach()[:, -1, 0],
        metrics.on_batch(lambda logits: logits.mean().item()),
        metrics.on_outcome(lambda run: run.loss > 5),
    ],
)
def test_a_metric_without_a_gradient_is_refused(function):
    with pytest.raises(InputError, match=r"has no gradient; need .* Use patch for this metric"):
        attribution_patch(lens_of(), *pair(), site="z", metric=function)


def test_what_cannot_be_approximated_or_sampled_is_refused():
    with pytest.raises(InputError, match="approximate and put 'zero' were given"):
        attribution_patch(lens_of(), *pair(), site="z", metric=DIFFERENCE, put="zero")
    with pytest.warns(UserWarning, match="the same z"):
        found = attribution_patch(lens_of(), *pair(), site="z", positions=[0], metric=DIFFERENCE)
    assert "No patch changed anything" in repr(found)
    with pytest.raises(InputError, match="0 patches were requested"):
        found.sample(0, generator=torch.Generator())
    with pytest.raises(InputError, match="no patch of this sweep changes anything"):
        found.sample(3, generator=torch.Generator())
    with pytest.raises(InputError, match="steps is 0; need at least 1"):
        attribution_patch(lens_of(), *pair(), steps=0)


def test_in_steps_the_effects_of_all_embeddings_add_up_to_the_whole_difference():
    lens, (clean, corrupted) = lens_of(), pair()

    def missing(steps):
        found = attribution_patch(
            lens,
            clean,
            corrupted,
            by=("position",),
            layers=[0],
            metric=metrics.sink_mass(0),
            steps=steps,
        )
        return abs(float(found.frame["effect"].sum()) - (found.source - found.baseline)), found

    (many, found), (one, _) = missing(24), missing(1)
    assert many < 0.02 * abs(found.source - found.baseline)
    assert many < one / 4


def test_many_steps_add_up_in_half_precision_too(monkeypatch):
    asked = {"by": ("position",), "layers": [1], "metric": DIFFERENCE}
    runs = attribution_patch(wrap(tiny("llama").to(torch.bfloat16)), *pair(), **asked).runs
    monkeypatch.setattr(
        first_order,
        "metric_gradients",
        lambda at, **_: {key: one * 0 + 1 for key, one in at.items()},
    )
    for one in first_order._mean_gradients(runs, steps=600).values():
        assert one.float().mean().item() == pytest.approx(1, rel=0.01)


def test_screened_cells_are_the_strongest_to_first_order_and_patched_for_real():
    lens, (clean, corrupted) = lens_of(), pair()
    asked = {"site": "neurons", "by": ("layer", "unit"), "metric": DIFFERENCE}
    every = attribution_patch(lens, clean, corrupted, **asked).frame
    found = patch(lens, clean, corrupted, screen=5, progress=False, **asked).frame
    strongest = every.loc[every["effect"].abs().nlargest(5).index].sort_index()
    assert (
        found[["layer", "unit"]].to_numpy().tolist()
        == strongest[["layer", "unit"]].to_numpy().tolist()
    )
    assert found["approximation"].tolist() == pytest.approx(strongest["effect"].tolist())
    assert set(every["method"]) == {"gradient"}
    layer, unit = found.loc[0, ["layer", "unit"]]
    one = patch(
        lens,
        clean,
        corrupted,
        by=(),
        site="neurons",
        layers=[layer],
        units=[unit],
        metric=DIFFERENCE,
    )
    assert found.loc[0, "effect"] == pytest.approx(one.frame["effect"].item(), abs=1e-6)


def test_a_screened_effect_is_judged_among_all_that_it_was_chosen_from():
    lens, pairs = lens_of(), pair(n=4)
    asked = {"site": "neurons", "by": ("layer", "unit"), "controls": 0, "progress": False}
    asked |= {"metric": metrics.loss()}
    every = patch(lens, *pairs, **asked).frame.set_index(["layer", "unit"])
    for most in (1, 3):
        found = patch(lens, *pairs, screen=most, **asked).frame.set_index(["layer", "unit"])
        same = every.loc[found.index]
        assert found["corrected_p"].to_numpy() == pytest.approx(same["corrected_p"].to_numpy())
        assert are_shown(found).tolist() == are_shown(every)[every.index.isin(found.index)].tolist()


def test_screened_patches_of_every_site_are_those_of_each():
    asked = {"metric": DIFFERENCE, "screen": 4, "controls": 0, "progress": False}
    found = patch(lens_of(), *pair(), site="every", **asked)
    assert found.frame["site"].value_counts().tolist() == [4, 4, 4]
    alone = patch(lens_of(), *pair(), site="mlp_out", **asked).frame
    rows = found.frame.query("site == 'mlp_out'").merge(alone, on=["layer", "position"])
    assert rows["effect_x"].to_numpy() == pytest.approx(rows["effect_y"].to_numpy(), abs=1e-6)
