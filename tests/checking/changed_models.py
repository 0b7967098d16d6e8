"""Changes of a model, one after another, with a lens on it: it gives a fresh wrap's numbers, or it refuses.

``World`` holds a model and a lens. A step does one of ``RULES`` to the model, as a user would. Then each door is asked:
where all of them refuse, the model is wrapped again; where they answer, the numbers are those of a fresh wrap of a deep
copy of the model. A door that gives other numbers is *silently wrong*, which nothing excuses.
"""

import contextlib
import copy
import itertools
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from transformers.pytorch_utils import Conv1D

from sink_lens import Reading, TokenBatch, capture, run_with, stream, sweep, wrap
from sink_lens.edits import edit, freeze, zero
from sink_lens.edits.metrics import sink_mass
from sink_lens.errors import ModelError, SinkLensError
from sink_lens.models.adapters import unwrap_peft
from sink_lens.patching import patch
from sink_lens.report import style
from sink_lens.sweeps import EditGrid, Grid
from tests.tiny_families import tiny

FAMILIES = (
    "llama",
    "gpt2",
    "gpt_neox",
    "phi3",
    "qwen3",
    "gemma2",
    "opt",
    "mixtral",
    "gptj",
    "bloom",
)
_SIZES = {"num_hidden_layers": 2, "vocab_size": 64}
_GRID = Grid(edits=(EditGrid(kind="zero", site="z", layers=(0,), heads=(0,)),), controls=0)
_TOKENS = TokenBatch.from_tensor(
    torch.randint(3, 60, (2, 6), generator=torch.Generator().manual_seed(0))
)
_OTHER = TokenBatch.from_tensor(
    torch.randint(3, 60, (2, 6), generator=torch.Generator().manual_seed(1))
)
_DOUBLE = edit("z", lambda x, at: x * 2, layers=[1])
BEGIN_AGAIN = ("prune_weight", "setting_of_the_model", "layer_more_or_less")
"""Rules that leave no model which another lens could be put on, or that are told from one."""
OF_AN_ADAPTER = ("train_adapter", "scale_adapter", "merge_adapter")
WITHOUT_ADAPTER = ("add_adapter", "prune_weight", "resize", "own_forward")
REFUSED = (
    "the model was changed after it was wrapped",
    "went into compatibility mode after it was wrapped",
)


class SilentlyWrongError(AssertionError):
    """A door gave numbers that a fresh wrap does not give."""


class WronglyRefusedError(AssertionError):
    """A door refused a change that reaches the lens, or some doors refused and others did not."""


class World:
    """A model that is changed step by step, and a lens on it."""

    def __init__(self, family: str, *, seed: int, every_door: bool = True) -> None:
        """Begin; without ``every_door`` a step asks one of the two that take longest, now this one and now that."""
        self.family, self.seed, self.random = family, seed, random.Random(seed)
        self.costly = itertools.repeat("") if every_door else itertools.cycle(("patch", "sweep"))
        self.handles: list[Any] = []
        self.begin()

    def begin(self) -> None:
        self.model: Any = tiny(self.family, seed=self.random.randrange(1000), **_SIZES)
        self.handles.clear()
        self.lens = wrap(self.model)

    @property
    def base(self) -> Any:
        return unwrap_peft(self.model)

    @property
    def has_adapter(self) -> bool:
        return self.base is not self.model

    @property
    def is_compiled(self) -> bool:
        return any("_compiled_call_impl" in vars(one) for one in self.base.modules())

    def modules(self) -> list[tuple[nn.Module, str, Any]]:
        """Parent, name and module of what has a matrix of weights in a layer, adapters left out."""
        named = (
            (parent, *one)
            for parent in self.base.base_model.modules()
            for one in parent._modules.items()
        )
        linear = [
            one for one in named if isinstance(one[2], (nn.Linear, Conv1D)) and one[1] != "default"
        ]
        return [one for one in linear if "weight" in one[2]._parameters]

    def pick(self) -> tuple[nn.Module, str, Any]:
        return self.random.choice(self.modules())

    def step(self, rule: str) -> str:
        """Do one thing to the model, ask every door, and say what came: same, refused, or left out."""
        with _quiet():
            if rule in (WITHOUT_ADAPTER if self.has_adapter else OF_AN_ADAPTER):
                return "left out"
            must = RULES[rule](self)
            if must is None:
                return "left out"
            left_out = next(self.costly)
            found = self._answers(self.lens, left_out=left_out)
            refused = {name: one for name, one in found.items() if isinstance(one, ModelError)}
            if refused:
                ours = [any(text in str(one) for text in REFUSED) for one in refused.values()]
                if len(refused) < len(found) or not all(ours):
                    raise WronglyRefusedError(f"{rule}: {refused}")
                if must == "reaches":
                    raise WronglyRefusedError(f"{rule}: {next(iter(refused.values()))}")
                self._again(rule)
                return "refused"
            wanted = _wanted(wrap(copy.deepcopy(self.model)), left_out=left_out)
            wrong = [name for name, one in found.items() if not _same(one, wanted[name])]
            if wrong:
                raise SilentlyWrongError(f"{rule}: {', '.join(wrong)}")
            if must == "refused":
                raise WronglyRefusedError(f"{rule}: was not refused")
            return "same"

    def _again(self, rule: str) -> None:
        """Wrap the model again, as the error says; one whose own weights were folded is loaded again."""
        if rule in BEGIN_AGAIN or "compatibility" in rule:
            self.begin()
            return
        try:
            self.lens = wrap(self.model)
        except ModelError:  # such as a hook on a fused projection, which the bridge splits
            self.begin()

    def _answers(self, lens: Any, *, left_out: str) -> dict[str, Any]:
        """What each door gives: tensors, or the error that it raises."""
        doors: dict[str, Callable[[], Tensor]] = {
            "run_with": lambda: _logits(lens),
            "capture on the plain path": lambda: capture(lens, _TOKENS, sites=["z"], path="plain")[
                "z", 1
            ],
            "capture on the bridge": lambda: capture(lens, _TOKENS, sites=["z"], path="bridge")[
                "z", 1
            ],
            "patch": lambda: _values(
                patch(
                    lens,
                    _TOKENS,
                    _OTHER,
                    site="z",
                    metric="loss",
                    by=("layer", "head"),
                    layers=(1,),
                    progress=False,
                )
            ),
            "sweep": lambda: _swept(lens),
        }
        doors.pop(left_out, None)
        found: dict[str, Any] = {}
        for name, door in doors.items():
            try:
                found[name] = door()
            except ModelError as error:
                found[name] = error
        return found


def _wanted(lens: Any, *, left_out: str) -> dict[str, Tensor]:
    """What each door must give, from forwards alone: no engine and no run folder is needed to know it."""
    clean = capture(lens, _TOKENS, sites=["z"], layers=[1], path="bridge")["z", 1]
    found = {
        "run_with": _logits(lens),
        "capture on the plain path": clean,
        "capture on the bridge": clean,
    }
    if left_out != "patch":
        losses = []
        for head in range(clean.shape[2]):
            own = clean[:, :, head : head + 1]
            losses.append(run_with(lens, _OTHER, freeze("z", {1: own}, heads=[head])).loss)
        found["patch"] = torch.stack(losses).double().mean(1)
    if left_out != "sweep":
        without = run_with(lens, _TOKENS, zero("z", layers=[0], heads=[0]), loss=False)
        found["sweep"] = without.mass_at(0).double().mean()[None]
    return found


def _logits(lens: Any) -> Tensor:
    found = run_with(lens, _TOKENS, _DOUBLE, logits=True).logits
    assert found is not None
    return found


def _values(result: Any) -> Tensor:
    return torch.tensor(result.frame["value"].to_numpy())


def _swept(lens: Any) -> Tensor:
    with tempfile.TemporaryDirectory() as folder:
        found = sweep(
            lens,
            _GRID,
            tokens=_TOKENS,
            metrics=[sink_mass(0)],
            out=Path(folder) / "run",
            progress=False,
        )
    return _values(found)


def _same(found: Tensor, wanted: Tensor) -> bool:
    if isinstance(found, Exception) or isinstance(wanted, Exception) or found.shape != wanted.shape:
        return False
    tolerance = 1e-4 * max(1.0, float(wanted.double().abs().max()))
    return found.dtype == wanted.dtype and bool(
        torch.allclose(found, wanted, rtol=1e-4, atol=tolerance)
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without pictures, warnings and lines of the log."""
    import logging

    logging.disable(logging.WARNING)
    try:
        with (
            warnings.catch_warnings(),
            mock.patch.object(style, "figure_bytes", return_value=b"a picture"),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


# --- rules: what is done; it must reach the lens ("reaches"), be refused ("refused"), or either ("either") ---


def _other_weights(world: World) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(world.random.randrange(1000))
    return {
        name: one
        + 0.05 * torch.randn(one.shape, generator=generator, dtype=torch.float32).to(one.dtype)
        if one.is_floating_point()
        else one.clone()
        for name, one in world.model.state_dict().items()
    }


def _in_place(world: World) -> str:
    """What a change of all weights in place must do."""
    return "refused" if world.has_adapter else "reaches"


def load_in_place(world: World) -> str:
    world.model.load_state_dict(_other_weights(world))
    return _in_place(world)


def load_assigned(world: World) -> str:
    world.model.load_state_dict(_other_weights(world), assign=True)
    world.base.tie_weights()
    return "refused"


def optimizer_step(world: World) -> str | None:
    if (
        world.family == "mixtral"
        or world.is_compiled
        or any(not one.requires_grad for one in world.base.parameters())
    ):
        return None
    optimizer = torch.optim.SGD(world.model.parameters(), lr=0.05)
    world.model(input_ids=_TOKENS.tokens, labels=_TOKENS.tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return _in_place(world)


def change_buffer(world: World) -> str | None:
    named = [
        one for name, one in world.base.named_buffers() if name.endswith("rotary_emb.inv_freq")
    ]
    if not named:
        return None
    named[0].mul_(1.1)
    return "reaches"


def replace_module(world: World) -> str:
    parent, key, module = world.pick()
    other = copy.deepcopy(module)
    other.weight.data.mul_(1.3)
    setattr(parent, key, other)
    return "refused"


def replace_buffer(world: World) -> str | None:
    for module in world.base.modules():
        if "inv_freq" in module._buffers:
            module.inv_freq = module.inv_freq * 1.1
            return "refused"
    return None


def setting_of_a_norm(world: World) -> str | None:
    name = {"variance_epsilon", "eps"}
    norms = [
        one
        for one in world.base.modules()
        if name & {*vars(one)} and one._parameters.get("weight") is not None
    ]
    if not norms:
        return None
    norm = world.random.choice(norms)
    key = next(iter(name & {*vars(norm)}))
    setattr(norm, key, getattr(norm, key) * 3)
    return "refused"


def add_adapter(world: World) -> str | None:
    if world.family == "mixtral":
        return None
    with torch.random.fork_rng():
        torch.manual_seed(world.random.randrange(1000))
        settings = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        world.model = peft.get_peft_model(world.model, settings)
    return "refused"


def prune_weight(world: World) -> str:
    _, _, module = world.pick()
    prune.l1_unstructured(module, "weight", 0.3)
    if world.random.random() < 0.5:
        prune.remove(module, "weight")  # the same parameter again, with other memory
        return "either"
    return "refused"


def remove_hook(world: World) -> str | None:
    if not world.handles:
        return None
    handle = world.handles.pop()
    hooks = handle.hooks_dict_ref()
    there = any(
        hooks is own
        for one in world.model.modules()
        for own in (one._forward_hooks, one._forward_pre_hooks)
    )
    handle.remove()
    return "refused" if there else "reaches"  # of a module that was replaced


def own_forward(world: World) -> str:
    layers = [one for _, _, one in world.modules() if "forward" not in vars(one)]
    module = world.random.choice(layers)
    module.forward = _Louder(type(module), module)
    return "refused"


class _Louder:
    """A forward that is put on one module; a copy of the module has its own."""

    def __init__(self, kind: Any, module: nn.Module) -> None:
        self.kind, self.module = kind, module

    def __call__(self, x: Tensor) -> Tensor:
        return self.kind.forward(self.module, x) * 1.1


def another_activation(world: World) -> str | None:
    for module in world.base.modules():
        for key in ("act_fn", "act", "activation_fn"):
            if isinstance(getattr(module, key, None), nn.Module):
                setattr(module, key, nn.Tanh())
                return "refused"
    return None


def layer_more_or_less(world: World) -> str:
    layers = next(one for one in world.base.modules() if isinstance(one, nn.ModuleList))
    if world.random.random() < 0.5:
        layers.append(copy.deepcopy(layers[0]))
    else:
        del layers[1]
    return "refused"


def hook_point(world: World) -> str:
    world.lens.bridge.blocks[0].hook_out.add_hook(lambda x, hook: x * 2)
    run_with(world.lens, _TOKENS)
    world.lens.bridge.reset_hooks()
    return "reaches"


def hidden_states(world: World) -> str | None:
    if world.is_compiled:  # under the shape checks of a test run, a graph of the experts fails
        return None
    with torch.no_grad():
        world.model(input_ids=_TOKENS.tokens, output_hidden_states=True, use_cache=False)
    return "reaches"


def compiled(world: World) -> str:
    world.base.compile(backend="eager")
    world.random.choice(list(world.base.base_model.children())).compile(backend="eager")
    return "reaches"


def kernel(world: World) -> str | None:
    if not world.base._can_set_attn_implementation():
        return None
    world.base.set_attn_implementation(
        world.random.choice(("eager", "sdpa") if world.family != "gemma2" else ("eager",))
    )
    return "reaches"


def failing_edit(world: World) -> str:
    def fails(x: Tensor, at: Any = None) -> Tensor:
        raise ArithmeticError("on purpose")

    def runs(x: Tensor, at: Any = None) -> Tensor:
        run_with(world.lens, _TOKENS)
        return x

    for function, said in ((fails, "on purpose"), (runs, "inside another one")):
        for run in (
            lambda one=function: run_with(world.lens, _TOKENS, edit("z", one, layers=[1])),
            lambda one=function: stream(
                world.lens, _TOKENS, [Reading(name="a", sites=("z",), function=one)]
            ),
        ):
            try:
                run()
            except (ArithmeticError, SinkLensError) as error:
                if said not in str(error):
                    raise
            else:
                raise SilentlyWrongError(f"an edit went on: {said}")
    return "reaches"


def _replace(of: Any, name: str, change: Callable[[Tensor], Tensor]) -> None:
    setattr(of, name, change(getattr(of, name)))


_REFUSED: dict[str, Callable[[World], object]] = {
    "setting_of_the_model": lambda world: setattr(world.base.config, "num_hidden_layers", 1),
    "train_adapter": lambda world: world.random.choice(
        [one for name, one in world.model.named_parameters() if "lora_" in name]
    ).data.add_(0.1),
    "scale_adapter": lambda world: world.random.choice(
        [one for one in world.base.modules() if hasattr(one, "set_scale")]
    ).set_scale("default", world.random.uniform(2, 4)),
    "merge_adapter": lambda world: setattr(world, "model", world.model.merge_and_unload()),
    "resize": lambda world: world.model.resize_token_embeddings(
        world.model.config.vocab_size + world.random.choice((1, 8)), mean_resizing=False
    ),
    "change_type": lambda world: world.model.to(
        torch.float64 if world.base.dtype == torch.float32 else torch.float32
    ),
    "replace_parameter": lambda world: _replace(
        world.pick()[2], "weight", lambda x: nn.Parameter(x.detach() * 1.3)
    ),
    "replace_in_bridge": lambda world: _replace(
        world.lens.bridge.blocks[1].attn.o.original_component,
        "weight",
        lambda x: nn.Parameter(x.detach() * 1.3),
    ),
    "add_pre_hook": lambda world: world.handles.append(
        world.pick()[2].register_forward_pre_hook(lambda module, args: (args[0] * 1.1,))
    ),
    "add_hook": lambda world: world.handles.append(
        world.pick()[2].register_forward_hook(lambda module, args, out: out * 1.1)
    ),
    "compatibility": lambda world: world.lens.bridge.enable_compatibility_mode(
        no_processing=world.random.random() < 0.3
    ),
    "hook_in_bridge": lambda world: world.lens.bridge.blocks[1].mlp.register_forward_hook(
        lambda *args: None
    ),
}
_REACHES: dict[str, Callable[[World], object]] = {
    "checkpointing": lambda world: world.base.gradient_checkpointing_enable(),
    "transformer_lens_run": lambda world: world.lens.bridge.run_with_hooks(
        _TOKENS.tokens, fwd_hooks=[("blocks.1.hook_out", lambda x, hook: x * 2)]
    ),
    "train": lambda world: world.model.train(),
    "evaluate": lambda world: world.model.eval(),
    "gradients": lambda world: world.model.requires_grad_(
        requires_grad=world.random.random() < 0.5
    ),
    "special_token": lambda world: setattr(
        world.base.config, "pad_token_id", world.random.randrange(3)
    ),
    "second_lens": lambda world: run_with(wrap(world.model), _TOKENS),
}


def _always(must: str, change: Callable[[World], object]) -> Callable[[World], str]:
    """The rule that makes a change, after which each door must do the same in every world."""

    def rule(world: World) -> str:
        change(world)
        return must

    return rule


def _of_weights(change: Callable[[nn.Module], object]) -> Callable[[World], str]:
    """The rule that changes the weights of a module where they are."""

    def rule(world: World) -> str:
        change(world.pick()[2])
        return "either" if world.has_adapter else "reaches"

    return rule


_OTHERS = (
    load_in_place, load_assigned, optimizer_step, change_buffer, replace_module, replace_buffer, setting_of_a_norm,
    add_adapter, prune_weight, remove_hook, own_forward,
    another_activation, layer_more_or_less, hook_point, hidden_states, compiled, kernel,
    failing_edit,
)  # fmt: skip
RULES: dict[str, Callable[[World], str | None]] = {
    **{name: _always("refused", change) for name, change in _REFUSED.items()},
    **{name: _always("reaches", change) for name, change in _REACHES.items()},
    "replace_data": lambda world: [
        _replace(world.pick()[2].weight, "data", lambda x: x * 1.3),
        "either",
    ][1],
    "change_data": _of_weights(lambda module: module.weight.data.mul_(1.3)),
    "copy_values": _of_weights(
        lambda module: module.weight.detach().copy_(module.weight.detach().flip(0))
    ),
    **{one.__name__: one for one in _OTHERS},
}
