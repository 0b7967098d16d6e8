"""What layers add to the stream is asked of the model: mixers of hybrids, and Gemma 4's input of each layer."""

import pytest
import torch
from transformer_lens.tools.analysis import logit_lens

from sink_lens import TokenBatch, direct_logit_attribution, run_with, wrap
from sink_lens.edits import freeze, metrics
from sink_lens.errors import InputError
from sink_lens.patching import patch, path_patch
from sink_lens.stats import corrected_p
from tests.tiny_families import tiny

CLEAN, CORRUPTED = (
    TokenBatch.from_tensor(
        torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(seed))
    )
    for seed in (0, 1)
)
FAMILIES = ["qwen3_5", "falcon_h1", "gemma4"]


@pytest.mark.parametrize(
    "family",
    [
        *FAMILIES,
        *(
            pytest.param(one, marks=pytest.mark.exhaustive)
            for one in ("lfm2", "bamba", "jamba", "olmo_hybrid", "granitemoehybrid")
        ),
    ],
)
def test_the_parts_of_a_logit_sum_to_it(family):
    lens = wrap(tiny(family))
    logits = run_with(lens, CLEAN, logits=True).logits[:, -1, 5]
    for by in ("layer", "head"):
        found = direct_logit_attribution(lens, CLEAN, 5, by=by)
        parts = set(found.frame["part"])
        assert ("mixer" in parts) == (family != "gemma4")
        assert ("layer input" in parts) == (family == "gemma4")
        if getattr(lens.config, "final_logit_softcapping", None) is None:
            assert found.values.sum(0).float() == pytest.approx(logits, abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_patch_of_every_site_has_a_row_where_a_layer_has_the_site(family):
    lens = wrap(tiny(family))
    found = patch(
        lens,
        CLEAN,
        CORRUPTED,
        site="every",
        metric="loss",
        by=("layer",),
        controls=0,
        progress=False,
    )
    wanted = [
        (layer, site)
        for layer in range(lens.n_layers)
        for site in ("resid_pre", *lens.added_sites(layer))
    ]
    assert list(found.frame[["layer", "site"]].itertuples(index=False, name=None)) == wanted
    alone = patch(
        lens,
        CLEAN,
        CORRUPTED,
        site="mlp_out",
        metric="loss",
        by=("layer",),
        controls=0,
        progress=False,
    )
    rows = found.frame.query("site == 'mlp_out'")
    assert rows["effect"].to_numpy() == pytest.approx(alone.frame["effect"].to_numpy(), abs=1e-6)
    assert found.values[rows.index].mean(1).numpy() == pytest.approx(rows["value"].to_numpy())
    assert found.frame["corrected_p"].to_numpy() == pytest.approx(  # among the patches of all sites
        corrected_p((found.values - found.baselines[0]).numpy()), nan_ok=True
    )


def test_layers_that_do_not_exist_are_refused_before_a_patch():
    with pytest.raises(InputError, match="layers: 9"):
        patch(
            wrap(tiny("qwen3_5")),
            CLEAN,
            CORRUPTED,
            site="every",
            metric="loss",
            layers=(0, 9),
            progress=False,
        )


def test_a_path_between_streams_leaves_nothing_live():
    """With all that layers add frozen, the last stream is what the residual connections carry of the sender's."""
    lens = wrap(tiny("gemma4"))
    end = lens.n_layers - 1
    options = {"receiver": ("resid_post", end), "metric": metrics.loss(), "progress": False}
    found = path_patch(lens, CLEAN, CORRUPTED, sender=("resid_pre", 0), **options)
    own, other = (
        run_with(lens, one, sites=("resid_pre", "resid_post"), loss=False).tensors
        for one in (CORRUPTED, CLEAN)
    )
    carried = (
        own["resid_post", end]
        + (other["resid_pre", 0] - own["resid_pre", 0]) * lens.remaining_scales[0]
    )

    ended = run_with(lens, CORRUPTED, freeze("resid_post", {end: carried}, layers=[end])).loss
    assert found.frame["value"].item() == pytest.approx(ended.double().mean().item(), abs=1e-5)


@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1"])
def test_own_hook_points_are_in_eval_mode_like_all_others(family):
    lens = wrap(tiny(family))
    assert not any(one.training for one in lens.bridge.modules())
    logit_lens(lens.bridge, CLEAN.tokens)
