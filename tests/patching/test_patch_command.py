"""``sink-lens patch``: what it shows, what it writes, and how errors end."""

import shlex
from dataclasses import replace

import pandas as pd
import pytest
from lenses import speaking
from typer.testing import CliRunner

from sink_lens import cli
from sink_lens.cli import patch as command
from sink_lens.data.tokens import from_prompts
from sink_lens.errors import InputError
from sink_lens.models import load as loading
from sink_lens.models.header import read_header
from sink_lens.patching.config import PatchConfig
from sink_lens.patching.estimate import _BESIDE, passes_of_patches
from sink_lens.records import read_run

PAIR = ["--clean", "the cat and the", "--corrupted", "the bat and the"]


def run(*arguments):
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(cli.app, ["patch", *map(str, arguments)])


@pytest.fixture(autouse=True)
def model(tmp_path, monkeypatch):
    """A tiny model under every name."""
    monkeypatch.setattr(loading, "load", lambda name, **options: speaking())
    monkeypatch.setenv("TQDM_DISABLE", "0")
    monkeypatch.chdir(tmp_path)


METRICS = [
    ["sink_mass"],
    ["sink_mass", "--sink-position", "1", "--metric-layers", "1,2"],
    ["logit_difference", "--correct", "a", "--incorrect", "b"],
    ["loss"],
    ["kl"],
    ["norm", "--metric-layers", "2"],
    ["dominance", "--sink-position", "2", "--metric-layers", "1"],
]


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: "_".join(metric))
def test_every_metric_is_swept_and_written(metric, tmp_path):
    result = run("tiny", *PAIR, "--site", "z", "--layers", "0-1", "--metric", *metric, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert "the prompts differ in 1 token" in result.stdout
    assert "the strongest of " in result.stdout
    written = read_run(tmp_path / "run")
    assert (written.kind, written.status, written.missing) == ("patch", "finished", [])
    patches = written.tables["patches"]
    assert set(patches["layer"]) == {0, 1}
    assert (tmp_path / "run" / "heatmap.png").read_bytes().startswith(b"\x89PNG")
    assert pd.notna(written.tables["summary"]["effect"]).all()
    assert len(written.tables["differences"]) == 1
    assert written.provenance["corrupted_sha256"] != written.provenance["tokens_sha256"]


def test_heads_positions_units_and_direction_are_passed_on(tmp_path):
    options = [
        "--by",
        "layer,position,head",
        "--heads",
        "1,3",
        "--positions",
        "2-4",
        "--units",
        "0-5",
        "--layers",
        "1",
    ]
    result = run("tiny", *PAIR, "--site", "z", *options, "--direction", "noising", "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    frame = read_run(tmp_path / "run").tables["patches"]
    assert [sorted(set(frame[name])) for name in ("layer", "position", "head")] == [[1], [2, 3, 4], [1, 3]]
    assert "noising" in result.stdout


def test_a_screen_is_checked_against_real_patches(tmp_path):
    result = run("tiny", *PAIR, "--approximate", "--check", "5", "--out", tmp_path / "run", "--metric", "loss")
    assert result.exit_code == 0, result.output
    assert "against 5 real patches" in result.stdout
    tables = read_run(tmp_path / "run").tables
    assert len(tables["check"]) == 5
    assert "approximation" in tables["patches"]


def test_several_pairs_are_one_batch(tmp_path):
    more = ["--clean", "on a hot day", "--corrupted", "on a cot day"]
    result = run("tiny", *PAIR, *more, "--by", "layer", "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert (read_run(tmp_path / "run").tables["patches"]["n"] == 2).all()


def test_quiet_prints_the_folder_alone(tmp_path):
    result = run("tiny", *PAIR, "--by", "layer", "--quiet", "--out", tmp_path / "run")
    assert result.stdout.strip() == str(tmp_path / "run")


def test_everything_at_once_is_one_patch_without_a_map(tmp_path):
    result = run("tiny", *PAIR, "--by", "", "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert len(read_run(tmp_path / "run").tables["patches"]) == 1
    assert not (tmp_path / "run" / "heatmap.png").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "give --clean TEXT and --corrupted TEXT"),
        (PAIR[:2], "give --clean TEXT and --corrupted TEXT"),
        (["--clean", "a cat", "--corrupted", "an elephant"], "need the same number"),
        ([*PAIR, "--metric", "beauty"], "metric is 'beauty'; need one of sink_mass"),
        ([*PAIR, "--metric", "logit_difference"], "give --correct TEXT"),
        ([*PAIR, "--metric", "logit_difference", "--correct", "giraffe"], "give --incorrect TEXT"),
        (
            [*PAIR, "--metric", "logit_difference", "--correct", "giraffe", "--incorrect", "a"],
            "tokens behind 'the cat and the'; need one",
        ),
        ([*PAIR, "--metric", "norm"], "give it with --metric-layers N"),
        ([*PAIR, "--layers", "2-0"], "--layers is '2-0'; need numbers and ranges such as 0-3,7"),
        ([*PAIR, "--layers", "0-9"], "layers: 3 does not exist; need 0 to 2"),
        ([*PAIR, "--site", "resid_mid"], "there is no site 'resid_mid'"),
        ([*PAIR, "--by", "layer,head"], "by head is not possible"),
        ([*PAIR, "--direction", "up"], "direction is 'up'; need one of denoising, noising"),
        ([*PAIR, "--sink-position", "99"], "reads position 99"),
        ([*PAIR, "--metric", "loss", "--sink-position", "1"], "it is for metric sink_mass and norm and dominance"),
        ([*PAIR, "--metric", "kl", "--metric-layers", "1"], "metric_layers is (1,), which nothing reads here"),
        ([*PAIR, "--correct", "a"], "it is for metric logit_difference"),
        ([*PAIR, "--steps", "5"], "steps is 5, which nothing reads here: it is for approximate and screen"),
        ([*PAIR, "--screen", "2", "--check", "3"], "it is for approximate. Leave it out"),
    ],
)
def test_bad_input_ends_with_code_2_and_leaves_no_folder(arguments, text, tmp_path):
    result = run("tiny", *arguments, "--out", tmp_path / "run")
    assert result.exit_code == 2
    assert text in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_finished_run_is_not_overwritten_unless_asked(tmp_path):
    again = ["tiny", *PAIR, "--by", "layer", "--out", tmp_path / "run"]
    assert run(*again).exit_code == 0
    refused = run(*again)
    assert refused.exit_code == 2
    assert "holds a finished run" in refused.stderr
    assert run(*again, "--overwrite").exit_code == 0


def test_the_examples_of_the_help_are_read():
    examples = [line.split("[dim]")[0] for line in command._EXAMPLES.splitlines() if line.startswith("sink-lens")]
    assert len(examples) == 4
    for example in examples:
        words = shlex.split(example)
        assert words[:2] == ["sink-lens", "patch"]
        result = run(*[word for word in words[2:] if word != "gpt2"], "--out", "x", "--layers", "0-99")
        assert "No such option" not in result.stderr
        assert result.exit_code == 2  # of these tokens or layers, not of the options


def test_passes_are_counted_from_the_files_and_from_the_first_token_that_differs(tmp_path):
    lens = speaking()
    lens.plain.save_pretrained(tmp_path / "model")
    lens.tokenizer.save_pretrained(tmp_path / "model")
    clean, corrupted = (from_prompts([text], lens.tokenizer).tokens[0].tolist() for text in PAIR[1::2])
    (first,) = [place for place, (one, other) in enumerate(zip(clean, corrupted, strict=True)) if one != other]
    header = read_header(tmp_path / "model")
    n, length, body, vocab = lens.n_layers, len(clean), header.n_body, header.n_vocab
    assert 0 < first < length - 1
    asked = PatchConfig(clean=PAIR[1:2], corrupted=PAIR[3:4], metric="loss")
    passes, tokens = passes_of_patches(asked, header, path=tmp_path / "model")
    # a patch at layer L runs n - L layers and the unembedding; controls at other positions are cells of the sweep
    by_hand = (length - first) * sum(((n - layer) / n * body + vocab) / (body + vocab) for layer in range(n))
    assert (passes, tokens) == (pytest.approx(_BESIDE + by_hand), length)
    near = replace(asked, metric="norm", metric_layers=(0,), layers=(0,), positions=(length - 1,), controls=0)
    assert passes_of_patches(near, header, path=tmp_path / "model")[0] == pytest.approx(
        _BESIDE + 1 / n * body / (body + vocab)
    )
    with pytest.raises(InputError, match=r"sequence 0 has . clean and . corrupted tokens; need the same number"):
        passes_of_patches(replace(asked, clean=("the cat",)), header, path=tmp_path / "model")
    with pytest.raises(InputError, match="norm is read at one layer"):
        passes_of_patches(replace(asked, metric="norm"), header, path=tmp_path / "model")
