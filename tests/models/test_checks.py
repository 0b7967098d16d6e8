"""What is checked before a model is handed out finds what it is there to find."""

import copy
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.utils.import_utils import KERNELS_MIN_VERSION

from sink_lens.errors import ModelError
from sink_lens.models import checks
from sink_lens.models.families import FAMILIES
from sink_lens.models.load import load, wrap
from sink_lens.models.tiny import TINY_FAMILIES, tiny


class ONormForCausalLM(transformers.LlamaForCausalLM):
    """A subclass under a name of its own."""


class LlamaForCausalLM(transformers.LlamaForCausalLM):
    """A subclass under the name of its parent."""


class HeadNorm(nn.Module):
    """W_O behind a norm of each head's values: what the stock adapter of Llama leaves out."""

    def __init__(self, w_o):
        super().__init__()
        self.w_o = w_o

    def forward(self, z):
        heads = z.unflatten(-1, (4, -1))
        return self.w_o(nn.functional.rms_norm(heads, heads.shape[-1:]).flatten(-2))


def of_class(model_class):
    model = tiny("llama")
    model.__class__ = model_class
    return model


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_the_classes_of_transformers_are_known(family):
    model = tiny(family)
    found, row = checks.check_architecture(model), FAMILIES[type(model).__name__]
    if family.startswith("headnorm"):  # of which the configuration chooses some facts
        assert replace(found, sigmoid=False, sink_logit=False, head_gate=None, qk_norm=None) == row
        assert (found.head_gate is not None) == ("gate" in family)
    else:
        assert found is row


@pytest.mark.parametrize(
    ("model_class", "text"),
    [
        (ONormForCausalLM, r"the architecture 'ONormForCausalLM' is not known"),
        (LlamaForCausalLM, r"\.LlamaForCausalLM has the name of a class of transformers but is a different class"),
    ],
)
def test_a_subclass_does_not_get_its_parents_adapter_nor_a_bridge_of_it(model_class, text):
    model = of_class(model_class)
    for made in (model, build_bridge_from_module(model, "LlamaForCausalLM", hf_config=model.config)):
        with pytest.raises(ModelError, match=text):
            wrap(made)


def test_an_attention_that_was_replaced_inside_the_model_is_found_by_its_logits():
    """A subclass of the attention in a model of the right class: the adapter skips what it adds."""

    class Doubling(LlamaAttention):
        def forward(self, *args, **options):
            output, weights = super().forward(*args, **options)
            return 2 * output, weights

    model = tiny("llama")
    model.model.layers[1].self_attn.__class__ = Doubling
    with pytest.raises(ModelError, match=r"logits differ .* the adapter skips a part of this model"):
        wrap(model)


def test_a_module_in_place_of_a_projection_is_used_by_both_paths():
    model = tiny("llama")
    model.model.layers[1].self_attn.o_proj = HeadNorm(model.model.layers[1].self_attn.o_proj)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        lens = wrap(model)
        expected = lens.plain(ids, use_cache=False).logits
        found = lens.bridge(ids, use_cache=False)
    assert ((found - expected).norm(dim=-1) <= 1e-5 * expected.norm(dim=-1)).all()


def test_the_model_is_on_its_own_kernel_again_after_the_check():
    plain = tiny("llama")
    inner = copy.deepcopy(plain)
    bridge = build_bridge_from_module(inner, "LlamaForCausalLM", hf_config=inner.config)
    checks.check_logits(bridge, plain=plain)
    assert plain.config._attn_implementation == "sdpa"
    with torch.no_grad():
        plain.model.norm.weight.mul_(2)
    with pytest.raises(ModelError, match=r"differ from the plain model's by 5.0e-01 of their norm on 8 tokens"):
        checks.check_logits(bridge, plain=plain)
    assert plain.config._attn_implementation == "sdpa"


def test_logits_that_are_no_numbers_are_refused():
    plain = tiny("llama")
    with torch.no_grad():
        plain.model.norm.weight.fill_(torch.nan)
    with pytest.raises(ModelError, match=r"logits in torch.float32 are not finite on 8 tokens; need a type"):
        wrap(plain)


def test_a_type_in_which_a_pass_fails_is_refused():
    with pytest.raises(ModelError, match=r"a forward pass in torch.float64 fails \(.*\); .*Use float32"):
        wrap(tiny("gpt_oss").double())


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_edits_of_the_attention_are_found_to_take_effect(family):
    lens = wrap(tiny(family))
    assert checks.uneditable_sites(lens.bridge, plain=lens.plain) == frozenset()


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_delegated_attention_is_found_without_a_warning(kernel):
    """Under sdpa, the hook of the pattern of the stock OPT adapter never fires; under eager it fires in vain."""
    plain = tiny("opt", attn_implementation=kernel)
    inner = copy.deepcopy(plain)
    bridge = build_bridge_from_module(inner, "OPTForCausalLM", hf_config=inner.config)
    assert checks.uneditable_sites(bridge, plain=plain) == {"pattern", "scores"}


def test_the_probe_is_eight_tokens_of_the_vocabulary():
    ids = checks.probe_tokens(tiny("llama"))
    # 7919 = 26 * 300 + 119
    assert ids.tolist() == [[119, 238, 57, 176, 295, 114, 233, 52]]


def test_keys_that_are_missing_left_over_or_of_other_shape_are_named():
    checks.check_keys({"missing_keys": set(), "unexpected_keys": ["h.0.attn.masked_bias"]}, name="m")
    with pytest.raises(ModelError, match=r"m: head has the shape \(3,\) in the checkpoint and \(4,\) by its config"):
        checks.check_keys({"mismatched_keys": {("head", (3,), (4,))}}, name="m")
    for kind in ("missing", "unexpected"):
        keys = [f"layer.{index}" for index in range(5)]
        with pytest.raises(ModelError, match=rf"m: {kind} keys .*: layer.0, layer.1, layer.2 and more \(5\); need"):
            checks.check_keys({f"{kind}_keys": keys}, name="m")


def test_a_class_that_is_not_the_one_that_wrote_the_checkpoint_is_refused():
    model = tiny("llama")
    checks.check_class(model, config=LlamaConfig())
    checks.check_class(model, config=LlamaConfig(architectures=["LlamaForCausalLM"]))
    with pytest.raises(ModelError, match=r"written by ONormForCausalLM and transformers opened it as LlamaForCausalLM"):
        checks.check_class(model, config=LlamaConfig(architectures=["ONormForCausalLM"]))


def test_a_configuration_may_name_the_code_that_transformers_has():
    known = {"architectures": ["LlamaForCausalLM"]}
    assert checks.check_config(known, name="m") is None
    assert checks.check_config(known | {"auto_map": {"AutoConfig": "configuration_x.X"}}, name="m") is None
    same = {"auto_map": {"AutoModelForCausalLM": "someone/llama--modeling_llama.LlamaForCausalLM"}}
    note = checks.check_config(known | same, name="m")
    assert note is not None
    assert "its own code (modeling_llama.LlamaForCausalLM)" in note
    with pytest.raises(ModelError, match=r"m brings its own code .* need an architecture that is part of transformers"):
        checks.check_config(known | {"auto_map": {"AutoModelForCausalLM": "modeling_x.LlamaForCausalLM"}}, name="m")


KERNELS = """
import types

class Anything:
    def __init__(self, *given, **named):
        pass

    def __getattr__(self, name):
        return Anything()

    def __call__(self, *given, **named):
        return Anything()

def decorator(*given, **named):
    return lambda decorated: decorated

def get_kernel(name, *given, **named):  # transformers asks for one of its own where it is imported
    if name == "somebody/kernel" or "flash-attn2" in name:
        open("canary", "a").write(name)
    found = types.ModuleType("kernel")
    found.flash_attn_func = found.flash_attn_varlen_func = lambda *given, **named: None
    return found

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return decorator if name.startswith("use_") else Anything
"""
LOADS = """
import json, pathlib, sink_lens, transformers
assert transformers.utils.is_kernels_available()
said = {}
for folder in sorted(pathlib.Path().glob("* *")):
    try:
        said[folder.name] = sink_lens.load(folder, device="cpu").plain.config._attn_implementation
    except sink_lens.errors.ModelError as error:
        said[folder.name] = str(error)
print(json.dumps(said))
"""


def test_a_kernel_of_the_hub_is_neither_fetched_nor_run(tmp_path):
    """A stand-in for the package kernels is installed, which leaves a file where somebody asks it for a kernel."""
    keys = ("_attn_implementation", "attn_implementation", "_attn_implementation_internal")
    tiny("llama").save_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    for value in ("somebody/kernel", "kernels-community/flash-attn2", "flash_attention_2"):
        for key in keys:
            shutil.copytree(tmp_path / "model", folder := tmp_path / f"{value.replace('/', ' ')} {key}")
            (folder / "config.json").write_text(json.dumps(config | {key: value}))
    shutil.rmtree(tmp_path / "model")
    (tmp_path / "site/kernels").mkdir(parents=True)
    (tmp_path / "site/kernels/__init__.py").write_text(KERNELS)
    (tmp_path / f"site/kernels-{KERNELS_MIN_VERSION}.dist-info").mkdir()
    (tmp_path / f"site/kernels-{KERNELS_MIN_VERSION}.dist-info/METADATA").write_text(
        f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n"
    )
    path = os.pathsep.join([str(tmp_path / "site"), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, "-c", LOADS],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not (tmp_path / "canary").exists(), (tmp_path / "canary").read_text()
    said = json.loads(done.stdout)
    assert len(said) == 3 * len(keys)
    for name, words in said.items():
        if name.startswith("flash"):  # transformers would fetch a kernel where flash_attn is not installed
            assert words == "sdpa"
        else:
            assert "which is code that would be fetched from the hub and run" in words


def test_a_fault_of_the_configuration_is_told_as_such(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change in ({"hidden_size": "a"}, {"num_attention_heads": 0}, {"hidden_act": "nosuch"}, {"vocab_size": -3}):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ModelError, match=r"config\.json describes no model"):
            load(tmp_path, device="cpu")


@pytest.mark.parametrize("path", ["", "self_attn", "mlp.up_proj"])
def test_a_module_of_two_layers_is_refused(path):
    model = tiny("llama")
    layers = model.model.layers
    if path:
        layers[2].set_submodule(path, layers[1].get_submodule(path))
    else:
        layers[2] = layers[1]
    with pytest.raises(ModelError, match=rf"layers 1 and 2 of .* share a module \({path or 'the whole layer'}"):
        wrap(model)


def test_layers_that_share_tensors_are_wrapped():
    model = tiny("llama")
    model.model.layers[2].mlp.up_proj.weight = model.model.layers[1].mlp.up_proj.weight
    assert wrap(model).n_layers == 3
