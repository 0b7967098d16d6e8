"""Edits that this model, these tokens or these values have no place for are refused, and say why."""

import pytest
import torch
from lenses import stock_opt

from sink_lens.edits.constructors import (
    EditError,
    clamp,
    edit,
    freeze,
    resample,
    scale,
    set_value,
    zero,
)
from sink_lens.engine.forward import run_with
from sink_lens.errors import InputError, SiteError
from sink_lens.models.tiny import VOCAB_SIZE

TOKENS = torch.randint(3, VOCAB_SIZE, (2, 12), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ({"layers": []}, "'zero z' chooses no layers; need at least one, or None for all"),
        ({"positions": []}, "'zero z' chooses no positions"),
        ({"heads": [1, 1]}, r"'zero z' names heads twice: \[1, 1\]; need each once"),
        ({"units": [3, 2, 3]}, r"'zero z' names units twice"),
    ],
)
def test_an_empty_or_doubled_choice_is_refused(where, text):
    with pytest.raises(InputError, match=text):
        zero("z", **where)


@pytest.mark.parametrize(
    ("site", "where", "text"),
    [
        ("z", {"layers": [3]}, "layer 3 of the edit 'zero z' does not exist; need 0 to 2"),
        (
            "z",
            {"layers": [2, -1]},
            r"the edit 'zero z' names layers twice: \[2, -1\] of 3; need each once",
        ),
        ("final", {"layers": [1]}, "layer 1 of the edit 'zero final' does not exist; need 0 to 0"),
        ("z", {"positions": [12]}, "position 12 of the edit 'zero z' does not exist; need 0 to 11"),
        ("scores", {"keys": [12]}, "key 12 of the edit 'zero scores' does not exist; need 0 to 11"),
        ("z", {"heads": [4]}, "head 4 of the edit 'zero z' does not exist; need 0 to 3"),
        ("v", {"heads": [2]}, "kv-head 2 of the edit 'zero v' does not exist; need 0 to 1"),
        (
            "neurons",
            {"units": [80]},
            "neuron 80 of the edit 'zero neurons' does not exist; need 0 to 79",
        ),
        (
            "z",
            {"units": [12]},
            "dimension of the head 12 of the edit 'zero z' does not exist; need 0 to 11",
        ),
        (
            "mlp_out",
            {"heads": [0]},
            "chooses heads and 'mlp_out' has the axes 'batch position d_model'",
        ),
        ("z", {"keys": [0]}, "chooses keys and 'z' has the axes .*; need a site that has keys"),
    ],
)
def test_a_place_that_does_not_exist_is_refused(lens_of, site, where, text):
    with pytest.raises(InputError, match=text):
        run_with(lens_of("llama"), TOKENS, zero(site, **where))


def test_what_is_no_choice_and_no_change_is_refused():
    with pytest.raises(
        InputError, match="'zero z' was given dims, layer; need some of layers, positions, heads"
    ):
        zero("z", layer=[1], dims=[0])
    for mask in ([True, False], torch.tensor([True, False])):
        with pytest.raises(InputError, match="units is a mask of True and False; need indices"):
            zero("z", units=mask)
    with pytest.raises(
        InputError, match=r"the function of the edit 'z' .*; need change\(values, at\)"
    ):
        edit("z", lambda x: x)
    with pytest.raises(InputError, match=r"layers is \[1.5\]; need a list of whole numbers"):
        zero("z", layers=[1.5])
    with pytest.raises(
        SiteError, match=r"'neurons' is computed before 'mlp_out'; need a site to read that comes"
    ):
        edit("neurons", lambda x, at: x, reads="mlp_out")
    with pytest.raises(SiteError, match=r"'z' is computed before 'z'"):
        edit("z", lambda x, at: x, reads="z")
    with pytest.raises(SiteError, match=r"no site 'mlp'; it is called 'mlp_out'"):
        edit("z", lambda x, at: x, reads="mlp")
    with pytest.raises(
        InputError, match=r"no values of 'z' for layers \[0, 2\]; need one tensor per layer"
    ):
        freeze("z", {1: torch.zeros(1, 1, 1, 1)}, layers=[0, 1, 2])
    with pytest.raises(InputError, match="'freeze z' chooses no layers"):
        freeze("z", {})
    for values in ({}, {0: torch.zeros(1, 12, 4, 12)}):
        with pytest.raises(InputError, match=r"values of at least 2 sequences; found [01]"):
            resample("z", values, generator=torch.Generator())
    with pytest.raises(InputError, match="neither low nor high; need at least one bound"):
        clamp("z")
    with pytest.raises(InputError, match=r"low 1.0 over high 0.0; need low at most high"):
        clamp("z", low=1.0, high=0.0)


@pytest.mark.parametrize("site", ["scores", "pattern"])
def test_edits_of_a_delegated_attention_are_refused(lens_of, site):
    stock = stock_opt()
    with pytest.raises(
        SiteError, match=rf"no '{site}' as used, and edits of it change nothing; need"
    ):
        run_with(stock, TOKENS, scale(site, 0.5))
    found = run_with(stock, TOKENS, scale("z", 0.5, layers=[1]), logits=True)
    expected = run_with(lens_of("opt"), TOKENS, scale("z", 0.5, layers=[1]), logits=True)
    torch.testing.assert_close(found.logits, expected.logits, rtol=0.0, atol=1e-5)
    torch.testing.assert_close(found.mass, expected.mass, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e39])
def test_an_edit_that_gives_no_number_is_named_with_its_layer(lens_of, bad):
    one = edit("z", lambda x, at: x.double() * bad if at.layer == 1 else x + 1, label="divided")
    with pytest.raises(
        EditError,
        match=r"the edit 'divided' of 'z' gave numbers that are not finite at layer 1; need",
    ):
        run_with(lens_of("llama"), TOKENS, one)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda x, at: x[:, 1:],
            r"gave \(2, 11, 4, 12\) at layer 0; need a tensor of the shape .*\(2, 12, 4, 12\)",
        ),
        (lambda x, at: 0.0, "gave float at layer 0"),
        (lambda x, at: x.to(torch.complex64), "gave complex numbers at layer 0"),
    ],
)
def test_a_result_of_another_shape_is_refused(lens_of, change, text):
    with pytest.raises(EditError, match=text):
        run_with(lens_of("llama"), TOKENS, edit("z", change))


@pytest.mark.parametrize("where", [{}, {"positions": [3]}])
def test_a_change_in_place_is_refused(lens_of, where):
    lens = lens_of("llama")
    with pytest.raises(
        EditError,
        match="the edit 'z' changed its values in place; need new values: clone them first",
    ):
        run_with(lens, TOKENS, edit("z", lambda x, at: x.mul_(2), **where))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "gpt2"])
@pytest.mark.parametrize(
    "one",
    [
        zero("scores"),
        set_value("pattern", 0.1),
        *(set_value(site, 1.0, positions=[4], keys=[9]) for site in ("scores", "pattern")),
    ],
)
def test_opening_what_the_mask_blocks_is_refused(lens_of, family, one):
    with pytest.raises(EditError, match=r"layer 0, so that tokens would see later"):
        run_with(lens_of(family), TOKENS, one)


@pytest.mark.parametrize("site", ["scores", "pattern"])
def test_opening_what_is_beyond_the_window_is_refused(lens_of, site):
    reach = set_value(site, 1.0, positions=[11], keys=[2])
    with pytest.raises(EditError, match=r"masked .* or tokens beyond their window"):
        run_with(lens_of("mistral"), TOKENS, reach)
    run_with(lens_of("llama"), TOKENS, reach)  # no window: the key is open


def test_a_row_without_an_open_score_is_refused(lens_of):
    blocked = set_value("scores", float("-inf"), positions=[5])
    for options in ({}, {"layers": [0], "loss": False}):
        with pytest.raises(EditError, match=r"not finite under the edits 'scores = -inf'"):
            run_with(lens_of("llama"), TOKENS, blocked, **options)


@pytest.mark.parametrize(
    ("values", "where", "text"),
    [
        (
            torch.zeros(2, 12, 48),
            {},
            r"of layer 1 have the shape \(2, 12, 48\); the chosen part has \(2, 12, 4, 12\)",
        ),
        (torch.zeros(()), {}, r"have the shape \(\)"),
        (torch.zeros(3, 12, 4, 12), {}, r"have the shape \(3, 12, 4, 12\)"),
        (
            torch.zeros(2, 12, 4, 12),
            {"heads": [2]},
            r"has \(2, 12, 1, 12\); need that shape, or size 1 where",
        ),
    ],
)
def test_held_values_of_another_shape_are_refused(lens_of, values, where, text):
    for batch_size in (1, 2):
        with pytest.raises(EditError, match=text):
            run_with(
                lens_of("llama"), TOKENS, freeze("z", {1: values}, **where), batch_size=batch_size
            )


def test_an_edit_behind_the_layers_that_are_run_says_so(lens_of):
    with pytest.warns(
        UserWarning, match="'zero z' changed nothing: the run ended before the layers that it edits"
    ):
        run_with(lens_of("llama"), TOKENS, zero("z", layers=[2]), layers=[0], loss=False)


def test_the_bridge_is_as_before_after_an_error(lens_of):
    lens = lens_of("llama")
    before = run_with(lens, TOKENS, logits=True).logits
    with pytest.raises(EditError):
        run_with(lens, TOKENS, scale("resid_pre", float("nan"), layers=[1]))
    assert torch.equal(run_with(lens, TOKENS, logits=True).logits, before)
