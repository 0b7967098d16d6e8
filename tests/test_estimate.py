"""What a run would cost: by the headers of a model's files, or by a timed pass of the model."""

import io
import subprocess
import sys

import pytest
from gguf_files import write_gguf
from lenses import lens_of
from rich.console import Console

from sink_lens import estimate as estimating
from sink_lens.chain.config import TraceConfig
from sink_lens.chain.passes import count_trace_passes as of_trace
from sink_lens.errors import InputError
from sink_lens.estimate import PassCount, PassCounts, cost_table, estimate_cost
from sink_lens.models.bundled import read_header
from sink_lens.models.header import axis_sizes
from sink_lens.models.load import load
from sink_lens.studies.config import CardConfig, QuantiseConfig
from sink_lens.studies.passes import count_study_passes as of_study


def shown(cost):
    text = io.StringIO()
    Console(file=text, width=200).print(cost_table(cost))
    return " ".join(text.getvalue().split())


def test_time_is_operations_over_their_speed_and_memory_is_libraries_weights_and_the_rest(
    planted_folder, monkeypatch
):
    monkeypatch.setattr(estimating, "measure_operations_per_second", lambda: 1e6)
    parts = (
        PassCount(name="read", forwards=2, tokens=10),
        PassCount(name="learn", backwards=1, tokens=5, slowness=2.0),
        PassCount(name="read by few", tokens=3, rows=16),
    )
    header = read_header(planted_folder)
    for unembeds, weights in ((False, header.n_body), (True, header.n_body + header.n_vocab)):
        asked = PassCounts(parts=parts, sequences=1, positions=10, bytes=1000, unembeds=unembeds)
        cost = estimate_cost(
            CardConfig(model=str(planted_folder), device="cpu"),
            lambda config, sizes, asked=asked: asked,
        )
        # 2 x 10 tokens; (1 + 3) x 5 tokens, twice as slow; 3 tokens, (1 + 64 / 16) times as slow; 2 operations a
        # number, and (1 + 400 / 48) for no products
        assert cost.seconds == pytest.approx(
            (20 + 40 + 15) * 2 * weights * (1 + 400 / header.d_model) / 1e6
        )
        assert cost.bytes_peak == 650_000_000 + header.weight_bytes() + 1000


def test_a_model_whose_headers_do_not_say_it_all_is_loaded_and_a_pass_is_timed(
    tmp_path, monkeypatch
):
    lens = lens_of("qwen3_moe")
    lens.plain.save_pretrained(tmp_path / "model")
    asked = {
        "model": str(tmp_path / "model"),
        "tokens": "random",
        "device": "cpu",
        "length": 16,
        "sequences": 8,
    }
    monkeypatch.setattr(estimating, "time_call", lambda piece, *, device, warm_up: piece() and 0.5)
    cost = estimate_cost(QuantiseConfig(controls=1, **asked), of_study)
    assert cost.seconds == pytest.approx(
        40 * 0.5
    )  # forty passes over all sequences, each as long as the timed one
    assert cost.bytes_weights == 4 * lens.plain.num_parameters()
    assert cost.bytes_peak > cost.bytes_weights
    assert (
        "passes at most 40 over all 8 sequences, 5,120 tokens time about 20 s, from one timed pass"
        in shown(cost)
    )
    text = shown(estimate_cost(TraceConfig(**asked, random_init=False), of_trace))
    for part in (
        "8 sequences of up to 16 tokens, on cpu",
        "scout",
        "measure",
        "interventions",
        "kernel fused",
        "disk",
    ):
        assert part in text
    with pytest.raises(InputError, match="has no tokenizer, so no text can be read"):
        estimate_cost(TraceConfig(**asked | {"tokens": "text"}), of_trace)


def test_two_models_are_read_in_the_same_passes(planted_folder):
    alone, both = (
        estimate_cost(CardConfig(model=str(planted_folder), others=others, device="cpu"), of_study)
        for others in ((), (str(planted_folder),))
    )
    assert both.bytes_weights == 2 * alone.bytes_weights
    assert both.passes.parts[0].forwards == alone.passes.parts[0].forwards == 6


def test_weights_that_are_narrower_in_their_files_are_said(planted_folder, tmp_path):
    lens = load(planted_folder, dtype="bfloat16")
    lens.plain.save_pretrained(tmp_path / "half")
    text = shown(
        estimate_cost(
            CardConfig(model=str(tmp_path / "half"), tokens="random", device="cpu"), of_study
        )
    )
    assert "in the checkpoint's own type (dtype='auto')" in text


def test_a_gguf_file_that_is_not_converted_is_estimated_by_its_header_and_nothing_is_written(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("SINK_LENS_CACHE", str(tmp_path / "cache"))
    gguf = tmp_path / "tiny.gguf"
    write_gguf(gguf)
    text = shown(
        estimate_cost(TraceConfig(model=str(gguf), sequences=6, length=16, device="cpu"), of_trace)
    )
    for part in (
        "tiny.gguf: 6 sequences of up to 16 tokens",
        "interventions",
        "tiny.gguf is converted first, once: ",
    ):
        assert part in text
    assert "about 6 over all 16 sequences" in shown(
        estimate_cost(CardConfig(model=str(gguf), length=16, device="cpu"), of_study)
    )
    assert not (tmp_path / "cache").exists()
    header = read_header(gguf)
    lens = load(gguf)
    parameters = sum(one.numel() for one in lens.plain.parameters())
    assert header.weight_bytes() == 4 * parameters
    assert header.n_body + header.n_vocab == parameters  # the unembedding is the embedding
    assert (header.n_layers, header.n_heads, header.n_context) == (
        lens.n_layers,
        lens.n_heads,
        lens.n_context,
    )
    assert header.family == lens.family
    for axes in (
        "batch position head d_head",
        "batch position kv_head d_head",
        "batch position d_mlp",
    ):
        assert axis_sizes(header, axes, n_positions=5) == lens.axis_sizes(axes, n_positions=5)
    assert "converted first" not in shown(
        estimate_cost(TraceConfig(model=str(gguf), sequences=6, length=16), of_trace)
    )


SWEPT = '[tokens]\nkind = "random"\nlength = 10\n[[edits]]\nsite = "z"\nheads = "each"\nlayers = "0-1"\n'
RANDOM = ("--tokens", "random")
DRY_RUNS = {
    "trace": ("trace", "MODEL", *RANDOM),
    "card": ("card", "MODEL", *RANDOM),
    "sweep": ("sweep", "FILE", "--model", "MODEL"),
    "train": ("train", "--size", "toy"),
    "a sweep of prompts": (
        "sweep",
        "FILE",
        "--model",
        "MODEL",
        "--tokens",
        "text",
        "--prompt",
        "the cat and the",
    ),
    "patch": ("patch", "MODEL", "--clean", "the cat", "--corrupted", "the bat", "--metric", "loss"),
    "circuit": ("circuit", "MODEL", "--task", "induction"),
}


@pytest.mark.parametrize("name", DRY_RUNS)
def test_a_dry_run_on_the_cpu_imports_no_library_of_models(name, planted_folder, tmp_path):
    """A tokenizer takes a part of transformers, and a training's timed step takes torch; no model is imported."""
    heavy = {"transformer_lens", "scipy", "accelerate", "pandas", "transformers.modeling_utils"}
    heavy |= set() if name in ("a sweep of prompts", "patch", "circuit") else {"transformers"}
    heavy |= set() if name == "train" else {"torch"}
    code = (
        "import sys\nfrom sink_lens.cli import app\n"
        "try:\n    app(prog_name='sink-lens')\nexcept SystemExit as end:\n    assert not end.code\n"
        f"print(sorted({heavy!r} & set(sys.modules)))"
    )
    grid = SWEPT if name == "sweep" else SWEPT.replace("length = 10\n", "")  # prompts have theirs
    (tmp_path / "sweep.toml").write_text(grid)
    given = {"MODEL": str(planted_folder), "FILE": str(tmp_path / "sweep.toml")}
    words = [given.get(word, word) for word in DRY_RUNS[name]] + ["--device", "cpu", "--dry-run"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], check=True, capture_output=True, text=True
    )
    assert "tokens" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
