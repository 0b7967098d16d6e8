"""``load`` and ``wrap``: one set of weights on two paths, from a folder or an object, or a refusal that says why."""

import functools
import json
import os

import numpy as np
import pytest
import torch
from lenses import ALL_FAMILIES, tokens
from lenses import lens_of as lens
from rounding import assert_rows_close
from safetensors.torch import load_file, save_file
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
from transformers import AutoModelForCausalLM, AutoTokenizer

from sink_lens.errors import InputError, ModelError
from sink_lens.models.load import load, random_init, weights_hash, wrap
from sink_lens.models.private_apis import NAME_OF_CONFIG
from sink_lens.models.tiny import tiny_tokenizer
from tests.tiny_families import HYBRID_FAMILIES, TINY_FAMILIES, tiny


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Family -> a folder written by save_pretrained, with the tiny tokenizer; made when first asked for."""

    @functools.cache
    def folder(family):
        path = tmp_path_factory.mktemp(family)
        tiny(family).save_pretrained(path)
        tiny_tokenizer().save_pretrained(path)
        return path

    return folder


def saved(path, family="llama", **changes):
    """A model in a folder, its config.json changed."""
    tiny(family).save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    return path


@torch.no_grad()
def logits(model):
    out = model(tokens(), use_cache=False)
    return getattr(out, "logits", out)


def boot(family, folder):
    model, tokenizer = (
        auto.from_pretrained(folder(family)) for auto in (AutoModelForCausalLM, AutoTokenizer)
    )
    if family.startswith("headnorm"):  # boot_transformers knows the classes of transformers alone
        return build_bridge_from_module(
            model, type(model).__name__, hf_config=model.config, tokenizer=tokenizer
        )
    return TransformerBridge.boot_transformers(
        "tiny", hf_model=model, tokenizer=tokenizer, device="cpu"
    )


def build(family, _):
    model = tiny(family)
    return build_bridge_from_module(model, type(model).__name__, hf_config=model.config)


# --- wrap ---


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_wrapped_model_is_the_plain_path_itself_and_shares_its_parameters_with_the_bridge(family):
    model = tiny(family)
    expected = logits(model)
    found = wrap(model, name="mine")
    assert found.plain is model
    assert found.name == "mine"
    assert (found.n_layers, found.n_heads, found.d_model, found.d_vocab, found.n_context) == (
        3,
        4,
        48,
        300,
        256,
    )
    assert found.d_mlp == (4 * 81 if family == "gpt_oss" else 80)
    assert (found.dtype, found.device) == (torch.float32, torch.device("cpu"))
    assert found.bridge.original_model.config._attn_implementation == "eager"
    assert found.plain.config._attn_implementation == (
        "eager" if family in ("gemma2", "gpt_oss") else "sdpa"
    )
    assert torch.equal(logits(model), expected)
    assert_rows_close(logits(found.bridge), expected)
    assert f"'mine', {type(model).__name__}, 3 layers" in repr(found)
    assert_shared(found)


def test_a_given_name_is_the_models_whatever_its_configuration_says():
    model = tiny("llama")
    for said in ("other", None):
        setattr(model.config, NAME_OF_CONFIG, said)
        assert wrap(model, name="mine").name == "mine"
    assert wrap(model).name == "LlamaForCausalLM"


def assert_shared(found, *, blind=(), buffers=True):
    """Every parameter lies in the bridge's memory, every buffer too or none, and a change is seen by both."""
    inside = {parameter.data_ptr() for parameter in found.bridge.parameters()}
    assert all(parameter.data_ptr() in inside for parameter in found.plain.parameters())
    inside = {buffer.data_ptr() for buffer in found.bridge.buffers()}
    assert all((buffer.data_ptr() in inside) == buffers for buffer in found.plain.buffers())
    assert all(parameter.device.type == "cpu" for parameter in found.plain.parameters())
    seen, plain_seen = logits(found.bridge), logits(found.plain)
    for name, parameter in found.layer(1).named_parameters():
        before, plain_before = seen, plain_seen
        with torch.no_grad():
            parameter.mul_(1.1).add_(
                0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
            )
        seen, plain_seen = logits(found.bridge), logits(found.plain)
        assert torch.equal(seen, before) == (name in blind), name
        assert not torch.equal(plain_seen, plain_before), name
    if not blind:
        assert_rows_close(seen, plain_seen)


@pytest.mark.parametrize("family", TINY_FAMILIES)
@pytest.mark.parametrize("make", [boot, build])
def test_a_wrapped_bridge_shares_its_parameters_with_the_plain_path(folders, family, make):
    bridge = make(family, folders)
    found = wrap(bridge)
    assert found.bridge is bridge
    assert found.family.architecture == type(tiny(family)).__name__
    assert found.plain.config._attn_implementation == found.family.plain_kernel
    assert_rows_close(logits(found.plain), logits(tiny(family)))
    assert weights_hash(found) == weights_hash(lens(family))
    # The stock adapters of two families: OPT's attention is delegated, GPT-NeoX's fused projection copied.
    assert found.uneditable == ({"pattern", "scores"} if family == "opt" else set())
    copied = family == "gpt_neox"
    assert (
        any("copies of the query, key and value weights" in note for note in found.notes) == copied
    )
    blind = ("attention.query_key_value.weight", "attention.query_key_value.bias") if copied else ()
    assert_shared(found, blind=blind, buffers=False)


@pytest.mark.parametrize("family", TINY_FAMILIES)
@pytest.mark.filterwarnings("ignore")  # enable_compatibility_mode warns about much
def test_a_bridge_in_compatibility_mode_is_refused(folders, family):
    bridge = boot(family, folders)
    bridge.enable_compatibility_mode()
    with pytest.raises(
        ModelError,
        match=r"weights are folded or centred.*Boot it without enable_compatibility_mode",
    ):
        wrap(bridge)


def test_a_bridge_whose_hooks_change_its_logits_is_refused(folders):
    bridge = build("llama", folders)
    bridge.blocks[1].hook_resid_pre.add_perma_hook(lambda tensor, hook: tensor * 1.001)
    with pytest.raises(
        ModelError, match=r"differ from the plain model's by .* need at most 1e-05.*a fresh bridge"
    ):
        wrap(bridge)


def test_a_bridge_puts_bos_before_a_text_and_the_notes_say_so(folders):
    bridge = boot("llama", folders)
    own = AutoTokenizer.from_pretrained(folders("llama"))
    assert (bridge.tokenizer("abc").input_ids[0], own("abc").input_ids[0]) == (1, 67)
    assert any("puts BOS in front" in note for note in wrap(bridge).notes)
    assert wrap(bridge, tokenizer=own).notes == ()
    assert wrap(bridge, tokenizer=own).tokenizer is own


@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_tokenizer_in_memory_is_enough_and_is_left_as_it_is(adds_bos):
    """TransformerLens opens it again by its name, which here is nobody's, and elsewhere is a name on a hub."""
    tokenizer = tiny_tokenizer(adds_bos=adds_bos)
    before = tokenizer("abc").input_ids, tokenizer.padding_side, tokenizer.name_or_path
    found = wrap(tiny("llama"), tokenizer=tokenizer)
    assert found.tokenizer is tokenizer
    assert (tokenizer("abc").input_ids, tokenizer.padding_side, tokenizer.name_or_path) == before
    assert found.bridge.to_tokens("abc").tolist() == [[1, 67, 68, 69]]


# --- load: what works ---


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_a_saved_folder_opens_with_equal_logits(folders, family):
    state = torch.get_rng_state()
    found = load(folders(family))
    assert torch.equal(torch.get_rng_state(), state)
    expected = logits(tiny(family))
    assert_rows_close(logits(found.plain), expected)
    assert_rows_close(logits(found.bridge), expected)
    assert found.name == str(folders(family))
    assert found.plain.config._attn_implementation == found.family.plain_kernel
    assert found.tokenizer is not None
    assert found.tokenizer("abc").input_ids == tiny_tokenizer()("abc").input_ids
    assert found.uneditable == frozenset()
    assert found.notes == () or family in HYBRID_FAMILIES
    assert not found.plain.training
    assert weights_hash(found) == weights_hash(lens(family))


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_folder_without_a_tokenizer_has_none(tmp_path, family):
    """Where there is no file of one, transformers makes up an empty tokenizer for some families."""
    tiny(family).save_pretrained(tmp_path)
    assert load(tmp_path).tokenizer is None
    mine = tiny_tokenizer()
    assert load(tmp_path, tokenizer=mine).tokenizer is mine


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_half_precision_loads_and_passes_the_checks(folders, family):
    found = load(folders(family), dtype="bfloat16")
    assert found.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in found.bridge.parameters()} == {torch.bfloat16}
    exact, half = logits(lens(family).plain), logits(found.plain).float()
    if family != "gpt_oss":  # rounding chooses other experts
        assert (half - exact).norm() < 0.05 * exact.norm()
    twin = random_init(found, seed=0)
    assert twin.dtype == torch.bfloat16
    kept = {name: buffer.dtype for name, buffer in found.plain.named_buffers()}
    assert {
        name: buffer.dtype for name, buffer in twin.plain.named_buffers()
    } == kept  # rotary tables in float32


def test_a_type_is_a_name_or_a_torch_type_and_a_place_a_device_or_a_map(folders, monkeypatch):
    monkeypatch.setenv("HOME", str(folders("llama").parent))
    for dtype, options in (
        (None, {"device": "cpu"}),
        ("torch.float32", {"device_map": "cpu"}),
        (torch.float32, {"device_map": {"": "cpu"}}),
        ("float64", {}),
    ):
        found = load(f"~/{folders('llama').name}", dtype=dtype, **options)
        assert str(found.dtype) == f"torch.{'float64' if dtype == 'float64' else 'float32'}"
        assert found.device.type == "cpu"
        assert_rows_close(logits(found.bridge), logits(tiny("llama")).to(found.dtype))


@pytest.mark.parametrize(
    ("family", "attention"), [("gpt2", "attn"), ("gptj", "attn"), ("gpt_neo", "attn.attention")]
)
def test_masks_that_old_versions_saved_as_weights_are_no_weights(family, attention, tmp_path):
    """Checkpoints of these on the hub hold bias and masked_bias of an attention: the causal mask."""
    tiny(family).save_pretrained(tmp_path)
    file, name = tmp_path / "model.safetensors", f"transformer.h.0.{attention}"
    extra = {f"{name}.bias": torch.ones(1, 1, 4, 4), f"{name}.masked_bias": torch.ones(1)}
    save_file(load_file(file) | extra, file, metadata={"format": "pt"})
    assert_rows_close(logits(load(tmp_path).plain), logits(tiny(family)))


def test_code_beside_a_checkpoint_of_a_known_class_is_not_run_and_noted(tmp_path):
    """As Phi-3's checkpoints on the hub: their config names modeling_phi3.Phi3ForCausalLM, which transformers has."""
    saved(tmp_path, "phi3", auto_map={"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"})
    (tmp_path / "modeling_phi3.py").write_text("raise RuntimeError('this code was run')")
    found = load(tmp_path)
    assert any("names its own code (modeling_phi3.Phi3ForCausalLM)" in note for note in found.notes)
    assert type(found.plain).__module__ == "transformers.models.phi3.modeling_phi3"


def test_no_service_is_asked_to_convert_pickled_weights(folders, monkeypatch):
    """transformers sends the name of a repository without safetensors to a conversion service unless told not to."""
    seen, honest = [], AutoModelForCausalLM.from_pretrained

    def from_pretrained(*args, **options):
        seen.append((os.environ.get("DISABLE_SAFETENSORS_CONVERSION"), options["use_safetensors"]))
        return honest(*args, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    load(folders("llama"))
    assert os.environ.get("DISABLE_SAFETENSORS_CONVERSION") is None
    assert seen == [("1", True)]


# --- load: what is refused ---


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(
        ModelError, match=r"has no config.json; need a folder written by save_pretrained"
    ):
        load(tmp_path)
    (tmp_path / "model.txt").write_text("weights")
    with pytest.raises(
        ModelError, match=r"model.txt is a file; need a folder .*, a .gguf file or a hub name"
    ):
        load(tmp_path / "model.txt")
    for name in ("/no/such/cache/models/abc", "./missing", "~/missing", "a/b/c"):
        with pytest.raises(
            ModelError, match=r"there is no folder .*(missing|(abc|a/b/c); need one)"
        ):
            load(name)
    with pytest.raises(
        ModelError,
        match=r"'nobody/nothing' is no folder and no file here, and the hub gave: .*a net",
    ):
        load("nobody/nothing")
    with pytest.raises(ModelError, match=r"weights of .* are on the device meta, which holds none"):
        wrap(tiny("llama").to("meta"))
    with pytest.raises(
        InputError, match=r"device, dtype given with a model object; they go with a name only"
    ):
        load(tiny("llama"), device="cpu", dtype="float32")


def test_pickled_weights_are_never_opened(tmp_path):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "opened"), "w"))

    saved(tmp_path)
    torch.save({"weights": Trap()}, tmp_path / "pytorch_model.bin")
    assert torch.equal(logits(load(tmp_path).plain), logits(tiny("llama")))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(
        ModelError,
        match=r"only pickled weights \(pytorch_model.bin\); need \*.safetensors.*run code",
    ):
        load(tmp_path)
    assert not (tmp_path / "opened").exists()


def test_weights_that_are_not_there_or_not_whole_are_refused(tmp_path):
    file = saved(tmp_path) / "model.safetensors"
    whole = file.read_bytes()
    for part in (b"", whole[:4], whole[: len(whole) // 2], None):
        file.unlink()
        file.symlink_to(tmp_path / "nowhere") if part is None else file.write_bytes(part)
        with pytest.raises(
            ModelError, match=r"the weights cannot be read \(.*\); need whole safetensors files"
        ):
            load(tmp_path)
    file.unlink()
    with pytest.raises(ModelError, match=r"has no weights; need \*.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "..", "", "gone.safetensors", None]
)
def test_an_index_that_names_no_file_of_the_folder_is_refused(tmp_path, name):
    folder = saved(tmp_path / "model")
    (tmp_path / "outside.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"lm_head.weight": name}})
    )
    with pytest.raises(ModelError, match=r"says that weights are in .*; need safetensors"):
        load(folder)


def test_weights_that_are_all_zero_are_named_as_such(tmp_path):
    file = saved(tmp_path) / "model.safetensors"
    save_file(
        {name: torch.zeros_like(tensor) for name, tensor in load_file(file).items()},
        file,
        {"format": "pt"},
    )
    with pytest.raises(ModelError, match="every logit of the model is 0"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "weight", "text"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, r"missing keys .*model.layers.1.mlp.up_proj"),
        ("o_norm", torch.ones(2), r"unexpected keys .*o_norm \(1\); need the weights of"),
        (
            "model.norm.weight",
            torch.ones(47),
            r"has the shape \(47,\) in the checkpoint and \(48,\) by its config",
        ),
    ],
)
def test_weights_of_another_architecture_are_refused(tmp_path, name, weight, text):
    file = saved(tmp_path) / "model.safetensors"
    weights = {
        one: value for one, value in (load_file(file) | {name: weight}).items() if value is not None
    }
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=text):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            r"'MambaForCausalLM' is not known; need one of Llama",
        ),
        (
            {"architectures": ["MiniCPM3ForCausalLM"]},
            r"'MiniCPM3ForCausalLM' is not known; .*compressed keys",
        ),
        # A subclass of Llama that left model_type as it was: transformers and TransformerLens would open a Llama.
        (
            {"architectures": ["ONormForCausalLM"]},
            r"'ONormForCausalLM' is not known; .*families.py",
        ),
        (
            {"architectures": ["MistralForCausalLM"]},
            "by MistralForCausalLM and transformers opened it as Llama",
        ),
        (
            {"auto_map": {"AutoModelForCausalLM": "modeling_mine.LlamaForCausalLM"}},
            r"its own code for the model \(modeling_mine.LlamaForCausalLM\), and remote code is never run",
        ),
        ({"model_type": "no_such_type"}, r"describes no model \(.*no_such_type"),
        (
            {"num_hidden_layers": 10**9},
            r"says 1,000,000,000 layers and the weights are \d+ tensors; need",
        ),
    ],
)
def test_a_configuration_is_refused(tmp_path, changes, text):
    saved(tmp_path, **changes)
    with pytest.raises(ModelError, match=text):
        load(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '"text"',
        b"\xff\xfe",
        "[" * 100_000,
        '{"architectures": "LlamaForCausalLM"}',
        '{"auto_map": [1]}',
    ],
)
def test_a_configuration_that_is_no_json_object_or_of_the_wrong_shape_is_refused(tmp_path, content):
    file = saved(tmp_path) / "config.json"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(
        ModelError, match=r"cannot be read|holds no JSON object|need a list of names and a table"
    ):
        load(tmp_path)


@pytest.mark.parametrize("named", ["index", "configuration"])
def test_weights_of_a_pickle_that_a_safetensors_folder_names_are_not_opened(
    tmp_path, named, monkeypatch
):
    plain = saved(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    if named == "index":
        index = {"metadata": {}, "weight_map": {"lm_head.weight": "pytorch_model.bin"}}
        (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        file = plain / "config.json"
        file.write_text(
            json.dumps(json.loads(file.read_text()) | {"transformers_weights": "pytorch_model.bin"})
        )
    monkeypatch.setattr(torch, "load", lambda *given, **options: pytest.fail("a pickle was opened"))
    with pytest.raises(ModelError, match=r"pytorch_model\.bin.*need safetensors"):
        load(tmp_path)


DAMAGED = [
    ("tokenizer_config.json", {"bos_token": ""}),
    ("tokenizer_config.json", {"extra_special_tokens": {"__class__": "<s>"}}),
    ("tokenizer_config.json", {"extra_special_tokens": {"encode": "<s>"}}),
    (
        "tokenizer.json",
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    ),  # a panic
    (
        "tokenizer.json",
        {
            "truncation": {
                "direction": "Right",
                "max_length": 2,
                "strategy": "OnlyFirst",
                "stride": 8,
            }
        },
    ),
]


@pytest.mark.parametrize(("file", "entry"), [("tokenizer.json", None), *DAMAGED])
def test_a_damaged_tokenizer_is_refused(tmp_path, file, entry):
    saved(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / file
    path.write_text("{" if entry is None else json.dumps(json.loads(path.read_text()) | entry))
    with pytest.raises(
        ModelError, match=r"the tokenizer of .* cannot be read.*Repair them, or pass tokenizer="
    ):
        load(tmp_path)
    assert load(tmp_path, tokenizer=tiny_tokenizer()).tokenizer is not None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"dtype": torch.int8},
            r"dtype '.*' is not known; need float32, bfloat16, float16, float64",
        ),
        ({"dtype": "load"}, r"dtype 'load' is not known"),
        (
            {"device": "abacus"},
            r"device abacus cannot be used here \(.*\); need cpu, cuda or cuda:N",
        ),
        ({"device": "meta"}, "device meta cannot be used here"),
        ({"device": "cpu", "device_map": "cpu"}, "both device and device_map were given"),
    ],
)
def test_a_type_or_a_place_that_is_none_is_refused(folders, options, text):
    with pytest.raises(InputError, match=text):
        load(folders("llama"), **options)


# --- hash and twin ---


def test_the_hash_changes_with_one_weight_and_not_with_the_way_of_loading(folders):
    model = wrap(tiny("gpt2"))
    before = weights_hash(model)
    assert (
        before == weights_hash(load(folders("gpt2"))) == weights_hash(wrap(boot("gpt2", folders)))
    )
    assert len(before) == 64
    with torch.no_grad():
        model.layer(2).mlp.c_proj.weight[3, 4] += 1e-6
    assert weights_hash(model) != before
    assert weights_hash(load(folders("gpt2"), dtype="bfloat16")) != before


def test_the_hash_of_a_scalar_or_a_turned_weight_is_that_of_its_numbers():
    models = [tiny("llama"), tiny("llama")]
    for model in models:
        layer = model.model.layers[0]
        weight = layer.mlp.up_proj.weight.detach()
        layer.mlp.up_proj.weight = torch.nn.Parameter(
            weight if model is models[0] else weight.T.contiguous().T
        )
        layer.register_parameter("scalar", torch.nn.Parameter(torch.tensor(2.0)))
    assert weights_hash(wrap(models[0])) == weights_hash(wrap(models[1]))


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_random_twin_has_the_configuration_and_other_weights(family):
    model = lens(family)
    # Python's own generator is left out: the shape checks of a test run draw from it.
    states = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    twin = random_init(model, seed=1)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]  # noqa: NPY002
    assert weights_hash(twin) == weights_hash(random_init(model, seed=1))
    assert (
        len({weights_hash(model), weights_hash(twin), weights_hash(random_init(model, seed=2))})
        == 3
    )
    assert twin.name == f"random init of {model.name} (seed 1)"
    shapes, of_model = (
        {name: w.shape for name, w in one.plain.named_parameters()} for one in (twin, model)
    )
    assert shapes == of_model
    assert twin.config.to_dict() == model.config.to_dict()
    assert twin.config is not model.config
    assert twin.plain.config._attn_implementation == model.family.plain_kernel
