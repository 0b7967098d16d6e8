"""What a trace would cost."""

import io
import subprocess
import sys

import pandas as pd
import pytest
from gguf_files import write_gguf
from lenses import lens_of
from live import LiveBytes
from rich.console import Console

from sink_lens.chain import estimate as costs
from sink_lens.chain import trace as tracing
from sink_lens.chain.config import TraceConfig
from sink_lens.chain.estimate import _PASSES_OF_MAKERS, bytes_beside, estimate
from sink_lens.chain.inputs import other_condition
from sink_lens.chain.timed_estimate import cost_of, timed_estimate
from sink_lens.chain.trace import trace
from sink_lens.errors import InputError
from sink_lens.models.header import read_header, sizes_of
from sink_lens.models.inputs import tokens_of
from sink_lens.models.load import load, wrap
from sink_lens.models.memory import set_aside
from sink_lens.models.tiny import planted, tiny_tokenizer
from sink_lens.studies.config import CardConfig
from sink_lens.studies.estimate import estimate as study_estimate


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    planted().model.save_pretrained(path)
    tiny_tokenizer(adds_bos=True).save_pretrained(path)
    return path


def shown(renderable):
    text = io.StringIO()
    Console(file=text, width=200).print(renderable)
    return text.getvalue()


def test_it_says_passes_time_memory_and_disk_and_what_is_left_out(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = shown(timed_estimate(TraceConfig(model=str(folder), tokens="random", sequences=6, length=16)))
    for part in ("6 sequences of up to 16 tokens", "fused kernel", "scout", "measure", "the other BOS condition"):
        assert part in text
    for part in (
        "random-init baseline",
        "in all",
        "of weights with the random-init baseline",
        "of readings",
        "of logits",
        "disk: about",
    ):
        assert part in text
    assert "Not included" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]  # nothing is written


def test_tokens_are_counted_by_pass():
    lens = wrap(planted().model, tokenizer=tiny_tokenizer(adds_bos=True))
    config = TraceConfig(model="planted", tokens="random", sequences=10, length=16, interventions=False)
    batch = tokens_of(lens, config=config, bos="auto")
    cost = cost_of(lens, batch, config=config, other=other_condition(lens, batch, config=config))
    # scout: 8 sequences of 16, twice (attention, then the stream)
    assert {one.name: one.tokens for one in cost.passes} == {
        "scout": 256,
        "measure": 160,
        "the other BOS condition": 256 + 160,
        "random-init baseline": 128 + 160,
    }
    assert cost.seconds == pytest.approx(sum(one.seconds for one in cost.passes))
    n_weights = sum(parameter.numel() for parameter in lens.plain.parameters())
    assert cost.bytes_weights == 2 * 4 * n_weights


def test_without_a_twin_and_a_bos_there_are_two_passes():
    lens = lens_of("gpt_oss")
    config = TraceConfig(model="tiny", tokens="random", sequences=2, length=12, random_init=False, interventions=False)
    cost = cost_of(lens, tokens_of(lens, config=config, bos="auto"), config=config, other=None)
    assert [one.name for one in cost.passes] == ["scout", "measure"]
    assert cost.bytes_weights == 4 * sum(parameter.numel() for parameter in lens.plain.parameters())


def test_the_cuts_are_more_passes_for_every_growth_step():
    counted = []
    for sink in (True, False):
        lens = wrap(planted(sink=sink).model, tokenizer=tiny_tokenizer(adds_bos=True))
        config = TraceConfig(
            model="planted", tokens="random", sequences=10, length=40, intervention_sequences=4, intervention_length=16
        )
        batch = tokens_of(lens, config=config, bos="auto")
        (cuts,) = [one for one in cost_of(lens, batch, config=config, other=None).passes if one.name == "interventions"]
        makers = min(config.choosing_sequences, batch.n_sequences) * _PASSES_OF_MAKERS  # on sequences of their own
        assert (cuts.tokens - 16 * makers) % (4 * 16) == 0
        assert cuts.tokens > 50 * 4 * 16
        counted.append(cuts.tokens)
    assert counted[0] == counted[1]  # one growth step, or the last layers instead


def test_what_cannot_be_cut_costs_no_cuts():
    lens = lens_of("llama")
    config = TraceConfig(model="tiny", tokens="random", sequences=2, length=11, random_init=False)
    cost = cost_of(lens, tokens_of(lens, config=config, bos="auto"), config=config, other=None)
    assert [one.name for one in cost.passes] == ["scout", "measure"]


def test_readings_grow_with_the_sequences():
    lens = lens_of("llama")
    sizes = []
    for sequences in (64, 128):
        config = TraceConfig(model="tiny", tokens="random", sequences=sequences, length=64, random_init=False)
        batch = tokens_of(lens, config=config, bos="auto")
        sizes.append(cost_of(lens, batch, config=config, other=None).bytes_panel)
    assert 1.2 < sizes[1] / sizes[0] <= 2


def test_it_refuses_what_trace_refuses(folder):
    with pytest.raises(InputError, match="takes at most 256"):
        estimate(TraceConfig(model=str(folder), tokens="random", length=300))


@pytest.mark.parametrize("words", ["trace", "card", "quantise", "card --by bos"])
def test_a_dry_run_that_reads_headers_takes_no_torch(folder, words):
    name, *more = words.split()
    command = ["sink-lens", name, str(folder), *more, "--tokens", "random", "--device", "cpu", "--dry-run"]
    code = (
        f"import sys\nfrom sink_lens.cli import main\nsys.argv = {command}\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "speed of a product of" in " ".join(done.stdout.split())
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.exhaustive
def test_the_peak_in_memory_is_within_a_fifth_of_a_real_traces(folder):
    """Each in a process of its own, by Linux's high-water mark; the tokens fill two forwards and a half."""
    code = (
        "import sys, warnings; warnings.simplefilter('ignore')\n"
        "from sink_lens.chain.config import TraceConfig\n"
        "from sink_lens.chain.timed_estimate import cost_of\n"
        "from sink_lens.chain.inputs import other_condition\n"
        "from sink_lens.chain.trace import trace\n"
        "from sink_lens.engine.cost import peak_bytes\n"
        "from sink_lens.models.inputs import model_of, tokens_of\n"
        "config = TraceConfig(model=sys.argv[1], tokens='random', sequences=320, length=16, interventions=False)\n"
        "lens = model_of(config)\n"
        "batch = tokens_of(lens, config=config, bos=config.bos)\n"
        "if len(sys.argv) == 2:\n"
        "    other = other_condition(lens, batch, config=config)\n"
        "    print(cost_of(lens, batch, config=config, other=other).bytes_peak)\n"
        "else:\n"
        "    trace(lens, config=config, out=sys.argv[2], progress=False, report=False)\n"
        "    print(peak_bytes('cpu'))\n"
    )
    said, held = (
        int(subprocess.run([sys.executable, "-c", code, str(folder), *more], check=True, capture_output=True).stdout)
        for more in ([], [str(folder / "run")])
    )
    assert 0.8 < said / held < 1.2


def test_the_estimate_of_a_quick_trace_is_within_a_quarter_of_the_tensors_that_it_holds(folder, tmp_path):
    """Bytes of tensors that are alive are counted, not the memory of a process, so that every run counts the same."""
    given = {"tokens": "random", "sequences": 10, "length": 24, "quick": True, "random_init": False}
    config = TraceConfig(model=str(folder), bos="with", device="cpu", **given)
    with LiveBytes() as live:
        lens = load(config.model)
        trace(lens, config=config, out=tmp_path / "run", progress=False, report=False)
    said = 4 * lens.plain.num_parameters() + bytes_beside(lens, config)
    assert 0.8 < said / live.peak < 1.25


def test_a_trace_that_does_not_fit_is_refused_and_its_dry_run_says_so(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "free_bytes", lambda: 1000)
    config = TraceConfig(model=str(folder), tokens="random", length=16, device="cpu")
    text = shown(costs.estimate(config))
    assert "one model after the other; 1 kB are free, so that the trace would be refused: need fewer sequences" in text
    with pytest.raises(InputError, match=r"the trace takes about .* beside the model and 1 kB are free"):
        trace(config, out=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_a_baseline_that_does_not_fit_beside_the_model_is_read_in_its_place_with_the_same_numbers(
    folder, tmp_path, monkeypatch
):
    config = TraceConfig(model=str(folder), tokens="random", sequences=6, length=16, interventions=False, device="cpu")
    beside = trace(config, out=tmp_path / "beside", progress=False, report=False)
    lens = load(folder)
    alone, both = bytes_beside(lens, config), bytes_beside(lens, config, twin=4 * lens.plain.num_parameters())
    monkeypatch.setattr(tracing, "free_bytes", lambda: (alone + both) // 2)
    waited = []
    monkeypatch.setattr(tracing, "set_aside", lambda *a, **k: waited.append(1) or set_aside(*a, **k))
    instead = trace(config, out=tmp_path / "instead", progress=False, report=False)
    assert waited
    for name in ("heads", "twin_heads", "links"):
        pd.testing.assert_frame_equal(beside.tables[name], instead.tables[name], rtol=1e-5, atol=1e-5)


def test_a_gguf_file_that_is_not_converted_is_estimated_by_its_header_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("SINK_LENS_CACHE", str(tmp_path / "cache"))
    gguf = tmp_path / "tiny.gguf"
    write_gguf(gguf)
    text = shown(estimate(TraceConfig(model=str(gguf), sequences=6, length=16, device="cpu")))
    for part in ("tiny.gguf: 6 sequences of up to 16 tokens", "interventions", "tiny.gguf is converted first, once: "):
        assert part in text
    assert "about 6 over all 16 sequences" in shown(
        study_estimate(CardConfig(model=str(gguf), length=16, device="cpu"))
    )
    assert not (tmp_path / "cache").exists()
    header = read_header(gguf)
    lens = load(gguf)
    parameters = sum(one.numel() for one in lens.plain.parameters())
    assert header.weight_bytes == 4 * parameters
    assert header.n_body + header.n_vocab == parameters  # the unembedding is the embedding
    assert (header.n_layers, header.n_heads, header.n_context) == (lens.n_layers, lens.n_heads, lens.n_context)
    assert header.family == lens.family
    for axes in ("batch position head d_head", "batch position kv_head d_head", "batch position d_mlp"):
        assert sizes_of(header, axes, n_positions=5) == lens.sizes(axes, n_positions=5)
    assert "converted first" not in shown(estimate(TraceConfig(model=str(gguf), sequences=6, length=16)))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "gemma3", "opt", "bloom"])
def test_the_headers_of_a_folder_say_what_its_model_has(name, tmp_path):
    lens = lens_of(name)
    lens.plain.save_pretrained(tmp_path)
    header = read_header(tmp_path)
    assert header.n_weights == lens.plain.num_parameters()
    sizes = (header.n_layers, header.n_heads, header.d_vocab, header.n_context)
    assert sizes == (lens.n_layers, lens.n_heads, lens.d_vocab, lens.n_context)
    assert header.n_vocab == lens.plain.get_input_embeddings().weight.numel()
    ends = {id(one): one.numel() for one in lens.plain.parameters() if one.shape == (lens.d_vocab, lens.d_model)}
    assert header.n_body == header.n_weights - sum(ends.values())
    assert header.family.architecture == lens.family.architecture
    for axes in ("batch position head d_head", "batch position kv_head d_head", "batch position d_mlp"):
        assert sizes_of(header, axes, n_positions=5) == lens.sizes(axes, n_positions=5)
    assert not header.has_tokenizer
    with pytest.raises(InputError, match="has no tokenizer"):
        estimate(TraceConfig(model=str(tmp_path), length=16, device="cpu"))


def test_a_mixture_of_experts_is_not_judged_by_its_header(tmp_path):
    lens_of("qwen3_moe").plain.save_pretrained(tmp_path)
    assert read_header(tmp_path) is None


SWEPT = '[tokens]\nkind = "random"\nlength = 10\n[[edits]]\nsite = "z"\nheads = "each"\nlayers = "0-1"\n'
RANDOM = ("--tokens", "random")
PAIR = ("--clean", "the cat and the", "--corrupted", "the bat and the")
DRY_RUNS = {
    "trace": ("trace", "MODEL", *RANDOM),
    "isolate": ("isolate", "MODEL", *RANDOM),
    "quantise": ("quantise", "MODEL", *RANDOM),
    "card": ("card", "MODEL", *RANDOM),
    "sweep": ("sweep", "FILE", "--model", "MODEL"),
    "train": ("train", "--size", "toy"),
    "a sweep of prompts": ("sweep", "FILE", "--model", "MODEL", "--tokens", "text", "--prompt", "the cat and the"),
    "patch": ("patch", "MODEL", *PAIR, "--site", "z", "--by", "layer,head"),
    "circuit": ("circuit", "MODEL", "--task", "induction"),
}
READ_TEXT = ("a sweep of prompts", "patch", "circuit")


@pytest.mark.parametrize("name", DRY_RUNS)
def test_a_dry_run_on_the_cpu_imports_no_library_of_models(name, folder, tmp_path):
    """A tokenizer takes a part of transformers, and a training's timed step takes torch; no model is imported."""
    heavy = {"transformer_lens", "scipy", "accelerate", "pandas", "transformers.modeling_utils"}
    heavy |= set() if name in READ_TEXT else {"transformers"}
    heavy |= set() if name == "train" else {"torch"}
    code = (
        "import sys\nfrom sink_lens.cli import app\n"
        "try:\n    app(prog_name='sink-lens')\nexcept SystemExit as end:\n    assert not end.code\n"
        f"print(sorted({heavy!r} & set(sys.modules)))"
    )
    (tmp_path / "sweep.toml").write_text(SWEPT)
    given = {"MODEL": str(folder), "FILE": str(tmp_path / "sweep.toml")}
    words = [given.get(word, word) for word in DRY_RUNS[name]] + ["--device", "cpu", "--dry-run"]
    done = subprocess.run([sys.executable, "-c", code, *words], check=True, capture_output=True, text=True)
    assert "tokens" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
