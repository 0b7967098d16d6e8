"""Numbers are those of eval mode and of torch's usual modes, and a model in training is left as it was."""

import contextlib
import copy
import itertools

import pytest
import torch
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

from sink_lens import Reading, TokenBatch, capture, generate, load, run_with, stream, sweep, wrap
from sink_lens.chain.config import TraceConfig
from sink_lens.chain.measure import scout
from sink_lens.edits.metrics import sink_mass
from sink_lens.identity.preference import last_logits
from sink_lens.patching import patch
from sink_lens.patching.attribution import attribution_patch
from sink_lens.report import style
from sink_lens.sweeps import EditGrid, Grid
from tests.tiny_families import tiny

DROPOUT = {
    "gpt2": {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3},
    "opt": {"dropout": 0.3, "attention_dropout": 0.3},
    "llama": {"attention_dropout": 0.3},
}


@pytest.fixture(autouse=True)
def plain_picture(monkeypatch):
    """Sweeps take longer to draw than to run."""
    monkeypatch.setattr(style, "figure_bytes", lambda figure, form: b"a picture")


def batch(seed=0):
    return TokenBatch.from_tensor(
        torch.randint(3, 60, (3, 12), generator=torch.Generator().manual_seed(seed))
    )


def in_training(family):
    """A model in training, but for its last layer, with one weight frozen."""
    model = tiny(family, **DROPOUT[family]).train()
    list(model.modules())[-1].eval()
    next(model.parameters()).requires_grad_(False)
    return model


def state(model):
    """Everything of a model that wrapping might change."""
    return (
        {name: module.training for name, module in model.named_modules()},
        {
            name: (parameter.requires_grad, id(parameter))
            for name, parameter in model.named_parameters()
        },
        {
            name: (len(m._forward_hooks), len(m._forward_pre_hooks))
            for name, m in model.named_modules()
        },
        model.config._attn_implementation,
        model.config.to_dict(),
        {name: type(module) for name, module in model.named_modules()},
    )


def numbers(lens, tmp_path):
    """What every way of running a model gives."""
    generator = torch.Generator().manual_seed(0)
    grid = Grid(edits=(EditGrid(kind="zero", site="z", layers=(0, 1), heads=(0,)),))
    found = {
        "plain": capture(lens, batch(), sites=["z"], path="plain")["z", 1],
        "bridge": capture(lens, batch(), sites=["pattern"], path="bridge")["pattern", 1],
        "run": run_with(lens, batch(), logits=True).logits,
        "scout": scout(lens, batch(), config=TraceConfig(model="tiny")),
        "patch": patch(lens, batch(), batch(1), site="z", metric=sink_mass(0), layers=(0,))
        .frame["value"]
        .tolist(),
        "last": last_logits(lens, batch()),
        "sweep": sweep(lens, grid, tokens=batch(), out=tmp_path / "sweep", progress=False).frame[
            "effect"
        ],
    }
    approximate = attribution_patch(
        lens, batch(), batch(1), site="z", metric=sink_mass(0), layers=(0,)
    )
    found["attribution"] = approximate.frame.to_dict("list")
    found["check"] = approximate.sample(2, generator=generator, progress=False).frame.to_dict(
        "list"
    )
    return found


def modes(bridge):
    """Which modules train, of the bridge's own and of those that it runs."""
    return [
        [module.training for module in root.modules()] for root in (bridge, bridge.original_model)
    ]


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return str(one) == str(other)


@pytest.mark.parametrize("family", DROPOUT)
def test_a_model_in_training_gives_the_numbers_of_eval_mode_and_stays_in_training(family, tmp_path):
    model = in_training(family)
    before = state(model)
    lens = wrap(model)
    assert state(model) == before
    assert not any(itertools.chain(*modes(lens.bridge)))
    found = numbers(lens, tmp_path / "train")
    assert state(model) == before
    assert load(model).plain is model
    assert state(model) == before
    expected = numbers(wrap(copy.deepcopy(model).eval()), tmp_path / "eval")
    assert [name for name in expected if not same(found[name], expected[name])] == []


def test_an_error_or_a_refusal_leaves_the_model_in_training():
    model = in_training("gpt2")
    before = state(model)
    lens = wrap(model)

    def fails(*args):
        raise ArithmeticError("on the way")

    with pytest.raises(ArithmeticError):
        stream(lens, batch(), [Reading(name="fails", sites=("z",), function=fails)])
    handle = lens.layer(1).register_forward_hook(fails)
    with pytest.raises(ArithmeticError):
        wrap(model)
    handle.remove()
    assert state(model) == before
    model = in_training("llama")
    model.lm_head.weight.data.fill_(torch.inf)
    before = state(model)
    with pytest.raises(Exception, match="not finite"):
        wrap(model)
    assert state(model) == before


def test_a_bridge_in_training_gives_the_numbers_of_eval_mode_and_stays_in_training(tmp_path):
    model = tiny("gpt2", attn_implementation="eager", **DROPOUT["gpt2"])
    bridge = build_bridge_from_module(model, "GPT2LMHeadModel", hf_config=model.config).eval()
    expected = numbers(wrap(bridge), tmp_path / "eval")
    words = generate(wrap(bridge), [5, 6, 7], max_new_tokens=8).plain_ids
    bridge.train()
    before = modes(bridge)
    lens = wrap(bridge)
    found = numbers(lens, tmp_path / "train")
    assert generate(lens, [5, 6, 7], max_new_tokens=8).plain_ids == words
    assert [name for name in expected if not same(found[name], expected[name])] == []
    assert modes(bridge) == before


@contextlib.contextmanager
def default_type(kind):
    torch.set_default_dtype(kind)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


MODES = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference mode": torch.inference_mode,
    "float64 by default": lambda: default_type(torch.float64),
    "bfloat16 by default": lambda: default_type(torch.bfloat16),
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_of_torch_change_no_number(mode, tmp_path):
    model = tiny("gpt2")
    lens = wrap(model)
    expected = numbers(lens, tmp_path / "plain")
    with MODES[mode]():
        found = [numbers(lens, tmp_path / "before"), numbers(wrap(model), tmp_path / "within")]
    for one in found:
        assert [name for name in expected if not same(one[name], expected[name])] == []
