"""Whatever stands in a model: each door gives the numbers of the model itself, by torch alone, or refuses."""

import contextlib
import functools
import threading

import peft
import pytest
import torch
from own_attention import batch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from sink_lens import capture, direct_logit_attribution, run_with, wrap
from sink_lens.circuits import find
from sink_lens.edits import zero
from sink_lens.edits.metrics import loss
from sink_lens.errors import SinkLensError
from sink_lens.patching import patch
from sink_lens.patching.attribution import attribution_patch
from tests.tiny_families import tiny

D_HEAD = tiny("llama").config.head_dim
CLEAN, CORRUPTED = batch(length=7), batch(1, length=7)


class Around(nn.Module):
    """A module around another one, whose output a function changes."""

    def __init__(self, inner, change=lambda out: 2 * out + 0.1):
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, *args, **kwargs):
        out = self.inner(*args, **kwargs)
        return (self.change(out[0]), *out[1:]) if isinstance(out, tuple) else self.change(out)


class Lora(nn.Linear):
    """LoRA by hand: a subclass with its own forward."""

    def __init__(self, base):
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.load_state_dict(base.state_dict())
        generator = torch.Generator().manual_seed(1)
        self.a = nn.Parameter(torch.randn(2, base.in_features, generator=generator) / 3)
        self.b = nn.Parameter(torch.randn(base.out_features, 2, generator=generator) / 3)

    def forward(self, x):
        return super().forward(x) + x @ self.a.T @ self.b.T


class Doubled(nn.Linear):
    """A projection that computes in 64 bit."""

    def __init__(self, base):
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.load_state_dict(base.state_dict())
        self.double()

    def forward(self, x):
        return super().forward(x.double()).to(x.dtype)


def at(path, make):
    """Another module at a path of layer 1, or of the model."""

    def change(model):
        root = model if path == "lm_head" or path.startswith("model.") else model.model.layers[1]
        parent, _, leaf = path.rpartition(".")
        holder = root.get_submodule(parent)
        made = make(getattr(holder, leaf))
        if made is not None:
            setattr(holder, leaf, made)
        return model

    return change


def bound(module):
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **kwargs)


def steering(module):
    module.register_forward_hook(
        lambda module, args, out: (out[0] + 0.3, *out[1:]) if isinstance(out, tuple) else out + 0.3
    )


def scaled_input(module):
    module.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))


def with_lock(module):
    module.turn = threading.Lock()


def pruned(module):
    prune.l1_unstructured(module, "weight", 0.3)


class Tripled(nn.Module):
    def forward(self, weight):
        return weight * 3


def layer_norm(module):
    return nn.LayerNorm(module.weight.shape[0])


def adapted(config):
    return lambda model: peft.get_peft_model(model, config)


def block(model):
    model.model.layers[1] = Around(model.model.layers[1])
    return model


LORA = {"r": 2, "target_modules": ["o_proj", "down_proj"], "init_lora_weights": False}
KINDS = {
    "nothing": lambda model: model,
    "a subclass of Linear, LoRA by hand, at o_proj": at("self_attn.o_proj", Lora),
    "the same at q_proj": at("self_attn.q_proj", Lora),
    "a module around down_proj": at("mlp.down_proj", Around),
    "a module around gate_proj": at("mlp.gate_proj", Around),
    "a clamp around v_proj": at(
        "self_attn.v_proj", lambda one: Around(one, lambda out: out.clamp(-0.2, 0.2))
    ),
    "a tanh around o_proj": at("self_attn.o_proj", lambda one: Around(one, torch.tanh)),
    "a module around lm_head": at("lm_head", Around),
    "a module around the MLP": at("mlp", Around),
    "a module around the attention": at("self_attn", Around),
    "a module around the layer": block,
    "a forward bound to o_proj": at("self_attn.o_proj", bound),
    "a forward bound to the MLP": at("mlp", bound),
    "a hook that steers the layer": lambda model: steering(model.model.layers[1]) or model,
    "a hook that steers o_proj": at("self_attn.o_proj", steering),
    "a hook before down_proj": at("mlp.down_proj", scaled_input),
    "a lock in a norm": at("input_layernorm", with_lock),
    "old weight_norm": at("mlp.up_proj", nn.utils.weight_norm),
    "weight_norm": at("mlp.down_proj", lambda one: parametrizations.weight_norm(one) and None),
    "a parametrised W_O": at(
        "self_attn.o_proj",
        lambda one: parametrize.register_parametrization(one, "weight", Tripled()) and None,
    ),
    "a pruned down_proj": at("mlp.down_proj", pruned),
    "a projection in 64 bit": at("self_attn.o_proj", Doubled),
    "a Sequential with dropout": at(
        "mlp.down_proj", lambda one: nn.Sequential(one, nn.Dropout(0.1))
    ),
    "LayerNorm for RMSNorm": at("post_attention_layernorm", layer_norm),
    "another activation": at("mlp.act_fn", lambda one: nn.Tanh()),
    "no MLP": at("mlp", lambda one: nn.Identity()),
    "a module around the embedding": at("model.embed_tokens", Around),
    "a compiled MLP": at("mlp", functools.partial(torch.compile, backend="eager")),
    "LoRA of peft": adapted(peft.LoraConfig(**LORA)),
    "DoRA of peft": adapted(peft.LoraConfig(**LORA, use_dora=True)),
    "IA3 of peft": adapted(
        peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    ),
}


def losses(model, tokens):
    logits = model(tokens, use_cache=False).logits
    return nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none"
    ).mean(1)


def inner(model):
    return model.base_model.model.model if isinstance(model, peft.PeftModel) else model.model


class Raw:
    """The model's numbers, read and changed by hooks of torch at its own modules."""

    def __init__(self, model):
        self.model, self.body = model, inner(model)

    def layers(self):
        return [getattr(one, "inner", one) for one in self.body.layers]

    def output_projection(self, layer):
        attention = self.layers()[layer].self_attn
        return getattr(attention, "inner", attention).o_proj

    @contextlib.contextmanager
    def change_z(self, layer, change):
        def hook(module, args):
            return (change(args[0]),)

        handle = self.output_projection(layer).register_forward_pre_hook(hook, prepend=True)
        try:
            yield
        finally:
            handle.remove()

    def z(self, tokens, layer):
        seen = []
        with self.change_z(layer, lambda x: seen.append(x.detach()) or x):
            self.model(tokens, use_cache=False)
        return seen[0]

    def numbers(self):
        clean, corrupted = CLEAN.tokens, CORRUPTED.tokens
        found = {}
        with torch.no_grad():
            found["run"] = self.model(clean, use_cache=False).logits
            found["capture"] = self.z(clean, 1)
            with self.change_z(
                1, lambda x: torch.cat([x[..., :D_HEAD] * 0, x[..., D_HEAD:]], dim=-1)
            ):
                found["edit"] = losses(self.model, clean)
            patched = []
            for layer in range(3):
                z = self.z(clean, layer)
                with self.change_z(layer, lambda x, z=z: z):
                    patched.append(losses(self.model, corrupted).mean())
            found["patch"] = torch.stack(patched)
            found["logit"] = found["run"][:, -1, 5]
        effects = []
        for layer in range(3):
            z, leaf = self.z(clean, layer), self.z(corrupted, layer).requires_grad_(True)
            with self.change_z(layer, lambda x, leaf=leaf: leaf):
                (gradient,) = torch.autograd.grad(losses(self.model, corrupted).mean(), leaf)
            effects.append((gradient * (z - leaf.detach())).sum())
        found["attribution"] = torch.stack(effects)
        found["circuit"] = self.edges_to_logits()
        return found

    def edges_to_logits(self):
        """Return each layer's MLP output, clean less corrupted, times the gradient of the loss by the last stream."""
        tokens, given, ends = (CLEAN.tokens, CORRUPTED.tokens), {}, []
        for number, one in enumerate(tokens):
            handles = [
                layer.mlp.register_forward_hook(
                    lambda m, a, out, at=(number, n): given.__setitem__(at, out.detach())
                )
                for n, layer in enumerate(self.layers())
            ]

            def keep(module, args):
                ends.append(args[0].detach().requires_grad_(True))
                return (ends[-1],)

            handles.append(self.body.norm.register_forward_pre_hook(keep))
            loss = losses(self.model, one).mean()
            if number == 0:
                (gradient,) = torch.autograd.grad(loss, ends[0])
            for handle in handles:
                handle.remove()
        return torch.stack([((given[0, n] - given[1, n]) * gradient).sum() for n in range(3)])


def doors(lens):
    asked = {"metric": loss(), "method": "eap", "edges": 20}
    edges = lambda: find(lens, CLEAN, CORRUPTED, **asked).every_edge  # noqa: E731
    return {
        "run": lambda: run_with(lens, CLEAN, logits=True).logits,
        "capture": lambda: capture(lens, CLEAN, sites=["z"])["z", 1].flatten(2),
        "edit": lambda: run_with(lens, CLEAN, zero("z", layers=[1], heads=[0])).loss,
        "patch": lambda: torch.tensor(
            patch(
                lens,
                CLEAN,
                CORRUPTED,
                site="z",
                by=("layer",),
                metric="loss",
                controls=0,
                progress=False,
            )
            .frame["value"]
            .to_numpy()
        ),
        "attribution": lambda: torch.tensor(
            attribution_patch(lens, CLEAN, CORRUPTED, site="z", by=("layer",), metric="loss")
            .frame["effect"]
            .to_numpy()
        ),
        "logit": lambda: direct_logit_attribution(lens, CLEAN, 5, by="neuron").values.sum(0),
        "circuit": lambda: torch.tensor(
            edges().query("writer.str.match('m[0-9]') and reader == 'logits'")["score"].to_numpy()
        ),
    }


def answers(kind):
    """Each door's answer for a kind of module: right, refused, or what else came."""
    model = KINDS[kind](tiny("llama", tie_word_embeddings=False)).eval()
    wanted, found = Raw(model).numbers(), {}
    try:
        asked = doors(wrap(model))
    except SinkLensError as error:
        return dict.fromkeys(wanted, "refused"), str(error)
    said = ""
    for name, door in asked.items():
        try:
            value = door().detach().double()
            off = (
                (value - wanted[name].detach().double()).abs().max()
                if value.shape == wanted[name].shape
                else 9e9
            )
            right = off <= 2e-4 * max(1.0, float(wanted[name].abs().max()))
            found[name] = (
                "right"
                if right
                else f"WRONG by {float(off):.2g} of {float(wanted[name].abs().max()):.2g}"
            )
        except SinkLensError as error:
            found[name], said = "refused", str(error)
        except Exception as error:  # noqa: BLE001  # what is counted
            found[name] = f"{type(error).__name__}: {error}"[:200]
    return found, said


FIRST = (
    "a subclass of Linear, LoRA by hand, at o_proj",
    "a module around lm_head",
    "a hook that steers o_proj",
)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(one, marks=() if one in FIRST else pytest.mark.exhaustive) for one in KINDS],
)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_every_door_is_right_or_refuses_whatever_stands_in_the_model(kind):
    found, said = answers(kind)
    assert set(found.values()) <= {"right", "refused"}, (found, said)
