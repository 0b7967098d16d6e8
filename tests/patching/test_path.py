"""Path patching: equal to TransformerLens, to the algebra of the stream, and to nothing where nothing leads."""

import warnings

import pytest
import torch
import transformer_lens.patching as reference
from lenses import lens_of
from prompt_pairs import pair
from rounding import close

from sink_lens.data.tokens import TokenBatch
from sink_lens.edits import metrics
from sink_lens.edits.constructors import freeze
from sink_lens.edits.part import Part
from sink_lens.engine import plan
from sink_lens.engine.forward import run_with
from sink_lens.errors import InputError, SiteError
from sink_lens.patching.patch import patch
from sink_lens.patching.path import PathConfig, path_patch
from tests.tiny_families import TINY_FAMILIES

CORRECT, WRONG = [5, 6], [7, 8]
DIFFERENCE = metrics.logit_difference(CORRECT, WRONG)


def value(found):
    return found.frame["value"].item()


@pytest.mark.parametrize("component", ["q", "k", "v"])
def test_a_direct_path_between_heads_equals_transformer_lens(component):
    lens, (clean, corrupted) = lens_of("gpt2"), pair()

    def metric(logits):
        rows = torch.arange(2)
        return (logits[rows, -1, CORRECT] - logits[rows, -1, WRONG]).mean()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        caches = [lens.bridge.run_with_cache(tokens)[1] for tokens in (clean, corrupted)]
        expected = reference.get_act_patch_direct_path(
            lens.bridge, corrupted, *caches, metric, 0, 1, component, verbose=False
        )
    for layer in (1, 2):
        for head in range(4):
            receiver = (component, layer, head)
            found = path_patch(
                lens, clean, corrupted, sender=("z", 0, 1), receiver=receiver, metric=DIFFERENCE
            )
            assert value(found) == pytest.approx(float(expected[layer, head]), abs=2e-5)


def test_the_direct_path_to_the_last_stream_adds_what_the_head_writes():
    lens, (clean, corrupted) = lens_of(), pair()
    z = [run_with(lens, tokens, sites=("z", "resid_post")).tensors for tokens in (clean, corrupted)]
    w_o = lens.layer(0).self_attn.o_proj.weight.view(48, 4, 12)[:, 3]
    written = (z[0]["z", 0][:, :, 3] - z[1]["z", 0][:, :, 3]) @ w_o.T
    edit = freeze("resid_post", {2: (z[1]["resid_post", 2] + written).detach()})
    expected = metrics.evaluate(
        DIFFERENCE, run_with(lens, corrupted, edit, layers=(2,), logits=True)
    ).mean()
    found = path_patch(
        lens, clean, corrupted, sender=("z", 0, 3), receiver=("resid_post", 2), metric=DIFFERENCE
    )
    assert value(found) == pytest.approx(float(expected), abs=1e-5)


def test_with_nothing_between_the_path_is_the_patch():
    lens, (clean, corrupted) = lens_of(), pair()
    for sender, receiver in (
        (("resid_post", 1), ("resid_pre", 2)),
        (("attn_in", 1), ("attn_out", 1)),
    ):
        found = path_patch(
            lens, clean, corrupted, sender=sender, receiver=receiver, metric=DIFFERENCE
        )
        site, layer = sender
        whole = patch(
            lens, clean, corrupted, site=site, by=("layer",), layers=[layer], metric=DIFFERENCE
        )
        assert value(found) == pytest.approx(whole.frame["value"].item(), abs=1e-5)
        assert found.baseline == pytest.approx(whole.baseline)
        assert found.source == pytest.approx(whole.source)


def test_mlps_between_carry_the_change_on_where_only_attention_is_frozen():
    lens, (clean, corrupted) = lens_of(), pair()
    ends = {"sender": ("attn_out", 1), "receiver": ("resid_post", 1), "metric": DIFFERENCE}
    direct = path_patch(lens, clean, corrupted, **ends)
    through = path_patch(lens, clean, corrupted, **ends, freeze="attention")
    whole = patch(
        lens, clean, corrupted, site="attn_out", by=("layer",), layers=[1], metric=DIFFERENCE
    )
    assert value(through) == pytest.approx(whole.frame["value"].item(), abs=1e-5)
    assert abs(value(direct) - value(through)) > 1e-4


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_list_of_senders_is_a_sweep_in_every_family(family):
    lens, (clean, corrupted) = lens_of(family), pair()
    senders = [("z", 0, 0), ("z", 0, 3), ("mlp_out", 1)]
    found = path_patch(
        lens, clean, corrupted, sender=senders, receiver=("final", 2), metric=DIFFERENCE
    )
    assert found.frame["head"].tolist()[:2] == [0, 3]
    assert found.frame["head"].isna().tolist()[2]
    assert (found.frame["effect"].abs() > 1e-7).all()
    assert found.frame["n"].tolist() == [2] * 3


def test_noising_is_denoising_with_the_runs_exchanged():
    lens, (clean, corrupted) = lens_of(), pair()
    ends = {"sender": ("z", 0, 1), "receiver": ("resid_post", 2), "metric": DIFFERENCE}
    noising = path_patch(lens, clean, corrupted, **ends, direction="noising")
    exchanged = path_patch(lens, corrupted, clean, **ends)
    assert noising.frame.equals(exchanged.frame)


def test_a_misspelt_choice_of_a_configuration_is_refused():
    with pytest.raises(InputError, match="freeze is 'attentoin'"):
        PathConfig(sender=("z", 0), receiver=("q", 1), metric=DIFFERENCE, freeze="attentoin")


def test_prompts_of_unlike_lengths_are_read_at_their_own_ends(monkeypatch):
    monkeypatch.setattr(plan, "_CPU_TOKENS", 8)
    lens, tokens = lens_of(), pair(n=4)
    lengths = torch.tensor([7, 5, 6, 4])
    both = [TokenBatch.from_tensor(one, lengths=lengths) for one in tokens]
    ends = {"sender": ("z", 0, 1), "receiver": ("resid_post", 2), "progress": False}
    ends |= {"metric": metrics.logit_difference(5, 7)}
    found = path_patch(lens, *both, **ends)
    alone = [
        path_patch(lens, *(one[row : row + 1, :n] for one in tokens), **ends)
        for row, n in enumerate(lengths.tolist())
    ]
    assert value(found) == pytest.approx(sum(map(value, alone)) / 4, abs=1e-5)


def test_positions_limit_both_ends():
    lens, (clean, corrupted) = lens_of(), pair(at=3)
    receiver = Part(site="v", layers=(2,), positions=(5,))
    early = Part(site="z", layers=(0,), positions=(1,))
    found = path_patch(
        lens, clean, corrupted, sender=[early, ("z", 0)], receiver=receiver, metric=DIFFERENCE
    )
    assert found.frame["effect"].tolist()[0] == close(0)  # before the difference
    only = Part(site="z", layers=(0,), positions=(5,))
    same = path_patch(lens, clean, corrupted, sender=only, receiver=receiver, metric=DIFFERENCE)
    assert value(same) == pytest.approx(
        found.frame["value"].tolist()[1], abs=1e-6
    )  # the stream does not move along


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        (
            {"sender": ("z", 2), "receiver": ("q", 1)},
            "z of layer 2 is not computed before the receiver q of layer 1",
        ),
        ({"sender": ("z", 1), "receiver": ("z", 1)}, "is not computed before"),
        ({"sender": [], "receiver": ("q", 1)}, "no sender was given"),
        ({"sender": ("z", 0, 4), "receiver": ("q", 1)}, "heads: 4 does not exist; need 0 to 3"),
        ({"sender": ("z", 3), "receiver": ("q", 1)}, "layers: 3 does not exist"),
        (
            {"sender": ("mlp_out", 0, 1), "receiver": ("q", 1)},
            "heads were chosen and 'mlp_out' has the axes",
        ),
        ({"sender": ("resid_mid", 0), "receiver": ("q", 1)}, "no site 'resid_mid'"),
    ],
)
def test_a_path_that_is_none_is_refused(ends, text):
    with pytest.raises((InputError, SiteError), match=text):
        path_patch(lens_of(), *pair(), **ends, metric=DIFFERENCE)
