"""A module is what it computes: whatever stands in a model is read right, or refused with the way out."""

import threading

import peft
import pytest
import torch
from own_attention import batch
from safetensors.torch import save_file
from tiers import first
from torch import nn

from sink_lens import capture, direct_logit_attribution, run_with, sweep, wrap
from sink_lens.circuits import find
from sink_lens.edits import zero
from sink_lens.edits.metrics import loss, on_outcome
from sink_lens.errors import ModelError
from sink_lens.models.load import load
from sink_lens.models.packed import weight_and_bias
from sink_lens.patching import patch
from sink_lens.patching.attribution import attribution_patch
from sink_lens.sweeps import EditGrid, Grid
from tests.tiny_families import tiny


class Lora(nn.Linear):
    """LoRA by hand: a subclass with its own forward."""

    def __init__(self, base):
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.load_state_dict(base.state_dict())
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.a, self.b = (
                nn.Parameter(torch.randn(2, base.in_features)),
                nn.Parameter(torch.randn(base.out_features, 2)),
            )

    def forward(self, x):
        return super().forward(x) + x @ self.a.T @ self.b.T / 9


class Around(nn.Module):
    """A module around a projection: twice what the projection gives, and a constant."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return 2 * self.inner(x) + 0.1


class Clipped(Around):
    """No matrix."""

    def forward(self, x):
        return self.inner(x).clamp(-0.5, 0.5)


PATHS = (
    "self_attn.q_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.down_proj",
    "lm_head",
)


def changed(kind, path, *, layer=1):
    """A model with another module at a path, and the same model with an ordinary one there where there is one."""
    models = [tiny("llama", tie_word_embeddings=False) for _ in range(2)]
    for model, made in zip(models, (kind, plain_of(kind)), strict=True):
        root = model if path == "lm_head" else model.model.layers[layer]
        parent, _, leaf = path.rpartition(".")
        holder = root.get_submodule(parent)
        setattr(holder, leaf, made(getattr(holder, leaf)))
    return models


def plain_of(kind):
    def make(base):
        with torch.no_grad():
            module, found = kind(base), nn.Linear(base.in_features, base.out_features)
            found.bias.copy_(module(torch.zeros(base.in_features)))
            found.weight.copy_((module(torch.eye(base.in_features)) - found.bias).T)
        return found

    return make


def numbers(lens):
    """What the doors give: of runs, edits, patches, gradients, logits' parts and circuits."""
    clean, corrupted = batch(length=7), batch(1, length=7)
    return {
        "run": run_with(lens, clean, logits=True).logits,
        "edit": run_with(lens, clean, zero("z", layers=[1], heads=[0])).loss,
        "capture": capture(lens, clean, sites=["attn_out"])["attn_out", 1],
        "patch": torch.tensor(
            patch(
                lens,
                clean,
                corrupted,
                site="z",
                by=("layer",),
                metric="loss",
                controls=0,
                progress=False,
            )
            .frame["value"]
            .to_numpy()
        ),
        "gradients": torch.tensor(
            attribution_patch(lens, clean, corrupted, site="z", by=("layer",), metric="loss")
            .frame["effect"]
            .to_numpy()
        ),
        "heads": direct_logit_attribution(lens, clean, 5, by="head").values[:9],
        "neurons": direct_logit_attribution(lens, clean, 5, by="neuron").values.sum(0),
        "circuit": torch.tensor(
            find(lens, clean, corrupted, metric=loss(), edges=20).every_edge["score"].to_numpy()
        ),
    }


@pytest.mark.parametrize(
    ("kind", "path"),
    first(
        [(kind, path) for kind in (Lora, Around) for path in PATHS],
        stay=lambda one: one == (Lora, "self_attn.o_proj"),
    ),
)
@pytest.mark.filterwarnings("ignore:the edit")
def test_another_linear_module_gives_the_numbers_of_its_matrix(kind, path):
    if (kind, path) == (Around, "lm_head"):  # TransformerLens reads the weight of an unembedding
        with pytest.raises(ModelError, match="lm_head"):
            wrap(changed(kind, path)[0])
        return
    found, wanted = (numbers(wrap(model)) for model in changed(kind, path))
    for door, value in wanted.items():
        assert torch.allclose(
            found[door].double(), value.double(), atol=2e-4 * max(1, float(value.abs().max()))
        ), door


@pytest.mark.parametrize("path", PATHS[:-1])
def test_a_module_that_is_no_matrix_runs_and_is_refused_where_weights_are_read(path):
    model, _ = changed(Clipped, path)
    with torch.no_grad():
        lens, wanted = wrap(model), model(batch().tokens, use_cache=False).logits
    assert torch.allclose(run_with(lens, batch(), logits=True).logits, wanted, atol=1e-5)
    with pytest.raises(ModelError, match=r"Clipped .* is no matrix"):
        weight_and_bias(lens.layer(1).get_submodule(path), dtype=torch.float32)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_lens_survives_forwards_of_ones_own():
    """PEFT's adapters of experts write equal values into the parameters in each forward."""
    adapted = peft.LoraConfig(
        r=2, target_parameters=["experts.down_proj"], target_modules=[], init_lora_weights=False
    )
    model = peft.get_peft_model(tiny("mixtral"), adapted)
    lens = wrap(model)
    before = run_with(lens, batch()).loss
    for _ in range(100):
        with torch.no_grad():
            model(batch(n=1, length=3).tokens)
    assert torch.equal(run_with(lens, batch()).loss, before)


def test_an_equal_parameter_in_the_place_of_another_is_no_change_until_it_changes():
    model = tiny("llama")
    lens = wrap(model)
    norm = model.model.layers[1].input_layernorm
    norm.weight = nn.Parameter(norm.weight.detach().clone())
    run_with(lens, batch())
    with torch.no_grad():
        norm.weight.mul_(2)
    with pytest.raises(ModelError, match=r"layers.1.input_layernorm.weight has other values"):
        run_with(lens, batch())


def test_weights_that_are_trained_during_a_sweep_are_noticed(tmp_path):
    model = tiny("llama")
    lens = wrap(model)
    grid = Grid(edits=(EditGrid(kind="zero", site="z", layers=(0, 1, 2), heads=(0,)),), controls=0)

    def training(run):
        with torch.no_grad():
            model.model.norm.weight.mul_(1.01)
        return run.loss

    with pytest.raises(ModelError, match="were changed while cells were run"):
        sweep(
            lens,
            grid,
            tokens=batch(),
            metrics=[on_outcome(training)],
            out=tmp_path / "run",
            progress=False,
        )


def test_another_thread_that_trains_the_model_during_a_sweep_is_noticed(tmp_path):
    model, steps, ended = tiny("llama"), threading.Semaphore(0), threading.Event()
    lens = wrap(model)
    grid = Grid(edits=(EditGrid(kind="zero", site="z", layers=(0, 1, 2), heads=(0,)),), controls=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train():
        while not ended.is_set():
            model(input_ids=batch().tokens, labels=batch().tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.release()

    def loss_after_a_step(run):
        steps.acquire()
        return run.loss

    other = threading.Thread(target=train)
    other.start()
    try:
        with pytest.raises(ModelError, match="were changed while cells were run"):
            sweep(
                lens,
                grid,
                tokens=batch(),
                metrics=[on_outcome(loss_after_a_step)],
                out=tmp_path / "run",
                progress=False,
            )
    finally:
        ended.set()
        other.join()


def keeps_output(model):
    layer = model.model.layers[1].mlp
    layer.register_forward_hook(lambda module, args, out: setattr(module, "kept", out))
    model(batch().tokens)


UNCOPIED = {
    "kept of model.layers.1.mlp .a LlamaMLP": keeps_output,
    "turn of model.norm .a LlamaRMSNorm": lambda model: setattr(
        model.model.norm, "turn", threading.Lock()
    ),
    "weight of model.layers.0.mlp.up_proj .a Linear": lambda model: nn.utils.weight_norm(
        model.model.layers[0].mlp.up_proj
    ),
}


@pytest.mark.parametrize("text", UNCOPIED)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_model_that_cannot_be_copied_says_what_is_in_the_way(text):
    model = tiny("llama")
    UNCOPIED[text](model)
    with pytest.raises(ModelError, match=text):
        wrap(model)


class Steered(nn.Module):
    """A decoder layer in a steering library's module."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, *args, **kwargs):
        return self.block(*args, **kwargs)


def test_wrapped_layers_and_bound_forwards_are_refused_by_name():
    model = tiny("llama")
    model.model.layers[1] = Steered(model.model.layers[1])
    with pytest.raises(ModelError, match=r"layer 1 of .*Steered"):
        wrap(model)
    model = tiny("llama")
    layer = model.model.layers[2]
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    with pytest.raises(ModelError, match=r"layer 2 of .* the layer \(a LlamaDecoderLayer\)"):
        wrap(model)


def test_a_compiled_model_is_the_model():
    model = tiny("llama")
    assert wrap(torch.compile(model, backend="eager")).plain is model


def test_weights_of_a_compiled_model_say_how_to_save_them(tmp_path):
    model = tiny("llama")
    model.save_pretrained(tmp_path)
    weights = {f"_orig_mod.{name}": one.contiguous() for name, one in model.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="compiled model: save its _orig_mod"):
        load(tmp_path, device="cpu")


def test_folders_of_a_trainer_and_of_a_mac_are_told(tmp_path):
    for step in (20, 100):
        tiny("llama").save_pretrained(tmp_path / f"checkpoint-{step}")
    with pytest.raises(ModelError, match="checkpoint-100"):
        load(tmp_path, device="cpu")
    (tmp_path / "checkpoint-100" / "._model.safetensors").write_bytes(b"\x00\x05\x16\x07")
    assert load(tmp_path / "checkpoint-100", device="cpu").n_layers == 3
