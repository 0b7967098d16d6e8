"""The norm as a part of another model equals that of the class, with each of the three first gains."""

import pytest
import torch
from torch import nn

from sink_lens.errors import InputError
from sink_lens.models.headnorm import (
    HeadNorm,
    HeadNormConfig,
    HeadNormForCausalLM,
    match_gains,
    undecayed,
)

SIZES = {
    "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 24,
}  # fmt: skip


def of_class(**fields):
    torch.manual_seed(3)
    return HeadNormForCausalLM(HeadNormConfig(**SIZES, **fields)).eval()


class Normed(nn.Module):
    """A part before W_O that a user puts there: the norm over heads that lie side by side."""

    def __init__(self, norm, w_o):
        super().__init__()
        self.norm, self.w_o = norm, w_o

    def forward(self, z):
        return self.w_o(self.norm(z.unflatten(-1, (-1, 12))).flatten(-2))


def with_norms(**shape):
    """The class without a norm, with one put before each W_O by hand."""
    model = of_class()
    for layer in model.model.layers:
        layer.self_attn.o_proj = Normed(HeadNorm(12, **shape), layer.self_attn.o_proj)
    return model


@pytest.mark.parametrize(
    ("norm", "shape"),
    [("shared", {}), ("per_head", {"n_heads": 4})],
    ids=["shared", "a gain a head"],
)
def test_the_part_is_the_class(norm, shape):
    tokens = torch.randint(
        50, (64, 24), generator=torch.Generator().manual_seed(0)
    )  # those of the class
    for init in ("ones", "dummy_pass", "matched"):
        wanted, found = of_class(value_norm=norm, value_norm_init=init), with_norms(**shape)
        w_o = {
            name.replace("o_proj", "o_proj.w_o"): one for name, one in wanted.state_dict().items()
        }
        lacking = found.load_state_dict(w_o, strict=False).missing_keys
        assert all(name.endswith("norm.gain") for name in lacking)
        torch.manual_seed(7)
        for own in wanted.model.layers:
            own.self_attn.initialise_gain()
        torch.manual_seed(7)
        for layer in found.model.layers:
            if init == "dummy_pass":
                layer.self_attn.o_proj.norm.draw_gain(layer.self_attn.v_proj.weight)
        if init == "matched":
            match_gains(found, [tokens])
        for layer, own in zip(found.model.layers, wanted.model.layers, strict=True):
            assert torch.equal(layer.self_attn.o_proj.norm.gain, own.self_attn.value_norm.gain), (
                init
            )
            assert init == "ones" or (own.self_attn.value_norm.gain < 0.9).all()
        with torch.no_grad():
            assert torch.equal(found(tokens).logits, wanted(tokens).logits), init


def test_matching_leaves_the_model_as_it_was_and_says_what_it_did_not_reach():
    model = with_norms(n_heads=4)
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    match_gains(
        model, torch.randint(50, (6, 24), generator=torch.Generator().manual_seed(1)).split(2)
    )
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(InputError, match="HeadNorm"):
        match_gains(nn.Linear(3, 3), [torch.ones(1, 3)])
    beside = nn.ModuleDict({"used": nn.Identity(), "aside": HeadNorm(3)})
    beside.forward = beside["used"].forward
    with pytest.raises(InputError, match="aside"):
        match_gains(beside, [torch.ones(1, 3)])


def test_matched_gains_by_hand():
    """Two tokens whose first head has mean squares 1 and 9, and whose second has 4 and 4: sqrt(5) and 2."""
    z = torch.tensor([[[1.0, 1.0], [2.0, 2.0]], [[3.0, 3.0], [2.0, 2.0]]])
    norm, shared = HeadNorm(2, 2, eps=0.0), HeadNorm(2)
    for one in (norm, shared):
        match_gains(one, [z[None]])
    assert norm.gain.tolist() == [pytest.approx([5**0.5] * 2), pytest.approx([2.0] * 2)]
    assert shared.gain.tolist() == pytest.approx([(5**0.5 + 2) / 2] * 2)
    assert norm(z)[0, 0].tolist() == pytest.approx([5**0.5] * 2)  # a head of root mean square 1
    norm.reset_parameters()
    assert norm.gain.eq(1).all()


def test_other_axes_and_sizes_are_refused():
    norm = HeadNorm(4, 2)
    for shape in ((3, 2, 5, 4), (3, 5, 8)):  # heads before positions; heads side by side
        with pytest.raises(InputError, match="transpose or unflatten"):
            norm(torch.ones(shape))
    with pytest.raises(InputError, match="3 sizes for 2 heads"):
        norm.set_gain(torch.ones(3))
    with pytest.raises(InputError, match="6 rows and a head 4"):
        norm.draw_gain(torch.ones(6, 8))


def test_gains_are_found_in_any_model():
    model = nn.ModuleDict({"first": HeadNorm(4, 2), "second": nn.Linear(3, 3, bias=False)})
    assert undecayed(model) == {"first.gain"}
    assert undecayed(model, unshared_gain=False) == frozenset()
