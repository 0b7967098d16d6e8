"""Every command of ``sink-lens``, which runs once for all that is said of it, and what every command refuses."""

import errno
import functools
import json
import os
import re
import shlex
from dataclasses import dataclass
from html import unescape
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from tiers import first
from typer.testing import CliRunner

from sink_lens import cli, read_run
from sink_lens.errors import InputError, RunError
from sink_lens.models.tiny import planted, tiny_tokenizer
from sink_lens.records import create_run
from sink_lens.records.writing import PAGE_MARK
from sink_lens.report import html
from sink_lens.sweeps import read_sweep

from .training.runs import watched, write_run

FILES = {
    "sweep.toml": '[tokens]\nkind = "random"\nsequences = 2\nlength = 10\n[[edits]]\nsite = "z"\nheads = "each"\n',
    "train.toml": "n_layers = 1\nd_model = 32\nd_mlp = 32\nn_heads = 2\nvocab_size = 300\nlength = 16\nbatch = 3\n"
    'steps = 4\nwarmup = 1\ncheckpoints = [0, 4]\neval_sequences = 4\ndevice = "cpu"\n',
    "text.toml": "n_layers = 2\nd_model = 16\nd_mlp = 24\nn_heads = 2\nvocab_size = 280\nlength = 12\nbatch = 4\n"
    'steps = 4\nwarmup = 1\nlog_every = 2\neval_every = 4\ndevice = "cpu"\ndata = "mine.txt"\n',
    "mine.txt": "It was the best of times, it was the worst of times, and nobody knew. " * 40,
    "unknown.toml": 'colour = 1\n[[edits]]\nsite = "z"\n',
    "broken.toml": "[[edits]\n",
    **{
        f"{name}.toml": f'[tokens]\nkind = "random"\nlength = 10\n[[metrics]]\nname = "norm"\n{rest}\n'
        for name, rest in {
            "site": 'layer = 0\n[[edits]]\nsite = "heart"',
            "layer": 'layer = 0\n[[edits]]\nsite = "z"\nlayers = 9',
            "metric": 'layer = 9\n[[edits]]\nsite = "z"',
        }.items()
    },
}
SMALL = "gpt2,n_layers=1,d_model=16,n_heads=2,vocab_size=64,n_context=64"
WORDS = {
    "RANDOM": "MODEL --tokens random --sequences 4 --length 24 --device cpu",
    "PAIR": "MODEL --clean 'a b c' --corrupted 'a d c' --device cpu",
    "PROSE": "MODEL --task text --pairs 2 --length 16 --method eap --device cpu",
    "GPT2": f"--untrained {SMALL} --sequences 64 --device cpu",
    "TWO": "MODEL MODEL-1 --sequences 50 --length 4 --coordinates 28",
    "SWEEP": "sweep sweep.toml --model MODEL --device cpu",
}
"""What many commands have in common."""


@dataclass(frozen=True)
class Asked:
    """What a command is asked, and what is said of its answer."""

    words: str
    """After the command's name; ``--out`` and the row's name follow where it writes a run."""
    shows: str
    """Pattern of what a reader sees."""
    has: str = ""
    """Keys of the object of ``--json``."""
    page: tuple[str, ...] = ()
    """Texts of the page."""
    writes: bool = True
    """False for a command without ``--out``."""
    code: int = 0


COST = r"passes +\S+.*time +(under|about) .*, from the model's size and the speed of.*memory +about"
ENDS = r".*report: \S.*report.html\n"
METRICS = (
    "kl",
    "norm --sink-position 1 --metric-layers 2",
    "logit_difference --correct ' a' --incorrect ' b'",
)
COMMANDS = {
    "trace": Asked(
        "RANDOM --no-interventions --no-random-init",
        r"Position 0 is the attention sink \(40% of heads\)\. What makes it was not tested\.\n"
        r".*present, not tested +variance → neurons.*report: trace/",
        "run report sentence links summary",
        ("key_sink", "default-src 'none'; script-src 'sha256-"),
    ),
    "trace --dry-run": Asked(
        "RANDOM --no-interventions --no-random-init",
        "4 sequences of up to 24 tokens, on the CPU.*scout +│ +96.*in all +│ +384.*disk.*memory +about",
    ),
    "isolate": Asked(
        "RANDOM --target-position 5 --layers 0 --controls 0",
        f"sink mass at position 5.*isolate.*sink mass at position 0{ENDS}",
        "run report sentence failed cells strongest",
    ),
    "amplify": Asked(
        "RANDOM --target-position 5 --layers 0 --factors 2 --centre none --controls 0",
        f"sink mass at position 5.*sink mass at position 0{ENDS}",
        "run report sentence failed cells strongest",
    ),
    **{f"{name} --dry-run": Asked("RANDOM", "cells") for name in ("isolate", "amplify")},
    "quantise": Asked(
        "RANDOM --controls 1",
        rf"Nothing to keep: int8_tensor changes the loss by.*all +\d+ .*undefined{ENDS}",
        "run report sentence verdict closed_share n",
    ),
    "tokens": Asked(
        "RANDOM",
        f"by attention: 4 of 96.*by norm: .*massive only.*(residual sink|sink token){ENDS}",
        "run report sentence thresholds agreement dimensions token_ids",
    ),
    **{f"{name} --dry-run": Asked("RANDOM", COST) for name in ("quantise", "tokens", "card")},
    "patch": Asked(
        "PAIR --layers 0-1 --site z --metric sink_mass",
        rf"the prompts differ in 1 token.*the strongest of \d+ patches of z, denoising: sink mass at{ENDS}",
        "run report metric differences strongest",
    ),
    **{
        f"patch by {one.split()[0]}": Asked(f"PAIR --layers 0-1 --site z --metric {one}", ENDS)
        for one in METRICS
    },
    "patch heads": Asked(
        "PAIR --site z --by layer,position,head --heads 1,3 --positions 2-3 --units 0-5 --layers 1 --direction noising "
        "--metric sink_mass",
        "noising: sink mass",
    ),
    "patch screened": Asked("PAIR --approximate --check 5 --metric loss", "against 5 real patches"),
    "patch pairs": Asked(
        "PAIR --clean 'b b a' --corrupted 'b c a' --by layer --metric loss", "differ in 2 tokens"
    ),
    "patch at once": Asked("PAIR --by '' --metric loss", "the strongest of 1 patches"),
    "patch --dry-run": Asked("PAIR --layers 0 --metric loss", COST),
    "circuit": Asked(
        "PROSE --sizes 0.1,1 --random 0 --check 0",
        f"bootstraps.*edge +score +95% interval{ENDS}",
        "run report sentences summary strongest",
    ),
    "circuit --dry-run": Asked("PROSE", "MODEL: 2 pairs.*scores .eap.*curve.*edges +541.*memory"),
    "sweep": Asked(
        "sweep.toml --model MODEL --device cpu",
        "of 20 edits .*over 2 sequences.*strongest effects on sink mass at position 0.*zero head output .*report: ",
        "run report sentence failed cells strongest",
    ),
    "sweep --dry-run": Asked(
        "sweep.toml --model MODEL --device cpu",  # of five layers a head of layer L takes 5 - L: 15 / 25
        "cells +20.*random controls beside them +0.*layers run for a cell +60% of all.*memory",
    ),
    "report --status": Asked(
        "sweep", "sweep: sweep, finished", "run kind state shards", writes=False
    ),
    "train": Asked(
        "train.toml",
        r"toy, softmax, seed 0: 4 steps, 192 tokens, \d+ s; loss 5\.\d+ nats, held out 5.*report: .*\ntrain\n",
        "run report sentence",
    ),
    "train faster": Asked("train.toml --lr 0.004", "toy, softmax"),
    "train text": Asked("text.toml", r"4 steps, 192 tokens, \d+ s; loss 5\.\d+ nats, held out 5\."),
    "train --dry-run": Asked(
        "text.toml --value-norm per_head",
        # 280 x 16, two layers of 4 x 256 + 3 x 384 + 2 x 16 + 2 x 8, and a last norm of 16
        r"parameters +8,944, 112 of them not decayed.*tokens +192 \(0\.0 a parameter\).*4 kept.*"
        r"a step +[\d.e-]+ s in one process.*from the speed of a product",
    ),
    "watch": Asked(
        "train --device cpu",
        "sinks above 0.3.*mass +S2 +norm +dominance +rank +w/o 0 +growth.*no sink at threshold 0.3.*report: ",
        "run report sentence table",
        writes=False,
    ),
    "compare": Asked(
        "train 'train faster' --group-by lr",
        "in learning rate: “0.004” against “0.002”, 1 seed.*of one seed, so it has no interval.*final losses, nats",
        "run report sentences notes finals",
    ),
    "preference": Asked(
        "GPT2 --seeds 0-1 --length 16",
        "top token relative to chance.*report.html",
        "run report variants summary",
        ("Do few tokens take most predictions?", "one token more often than chance would"),
    ),
    "preference --dry-run": Asked(
        "GPT2 --seeds 0-1 --length 32", r"4\.1\d?k.*the memory does not grow with the sequences"
    ),
    "contraction": Asked(
        "GPT2 --seeds 0-1 --length 16 --switch mlp",
        r"cosine between sequences.*All models: gpt2.*by att\..*no MLP",
        "run report variants summary",
        (
            "Where do states become alike?",
            "Does the seed set the direction?",
            "Contraction beside the sink",
        ),
    ),
    "contraction --dry-run": Asked(
        "GPT2 --length 32", "the memory does not grow with the sequences"
    ),
    "fingerprint": Asked(
        "TWO",
        "mean tau.*no common lineage shown.*Nothing shows that .*How often this answer is wrong.*report.html",
        "run report sentences notes pairs",
        ("One seed?", "Pair by pair", "relabelled", "2 (1 − Φ)"),
    ),
    "fingerprint of embeddings": Asked(
        "TWO --inputs embeddings", "unrelated models then look related"
    ),
    "fingerprint --dry-run": Asked("TWO", r"about a second per pair \(1 pair\)"),
    "report": Asked(
        "trace", "report: trace/", "runs report figures not_drawn sentence", writes=False
    ),
    "card": Asked(
        "RANDOM",
        rf"Keep the token at position 0: it is the sink of 40% \[40%, 40%\] of heads; .*model card: \S+/card\.md{ENDS}",
        "run report schema sentence sink bos outlier_dimensions loss chain",
        ("A sink at position 0 in 40% [40%, 40%] of heads, outlier dimension 29",),
    ),
    "card two": Asked(
        "MODEL-1 RANDOM",
        "From MODEL-1 to MODEL: loss.*quantity +first +second +change",
        "run report sentence within_bound changes",
        ("No change of the loss is shown", "within the bound of 0.25 nats"),
    ),
    "card many": Asked("trace card RANDOM", "model +sink rate", "columns rows", writes=False),
    "card worse": Asked(
        "MODEL worse --tokens random --sequences 4 --length 24", "lm_head.weight", code=1
    ),
    "card refused": Asked(
        "trace 'card two'", "error: card two holds a run of", writes=False, code=2
    ),
}
"""A name that begins with the command -> what it is asked; an option in the name is an option of the command."""


def meant(line):
    """The words of a line in which the words of ``WORDS`` stand for theirs."""
    for word, meaning in WORDS.items():
        line = re.sub(rf"\b{word}\b", lambda _, meaning=meaning: meaning, line)
    return shlex.split(line)


def words_of(name):
    command, *options = name.split()
    words = [
        command,
        *(one for one in options if one.startswith("--")),
        *meant(COMMANDS[name].words),
    ]
    return words + (["--out", name] if COMMANDS[name].writes and "--dry-run" not in options else [])


def run(*arguments, width=200):
    env = {"COLUMNS": str(width), "TERM": "dumb", "TQDM_DISABLE": "1"}
    return CliRunner(env=env).invoke(cli.app, [*map(str, arguments)])


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    """A folder with two models and one that is much worse, and the files that commands read."""
    folder = tmp_path_factory.mktemp("commands")
    for name, seed in (("MODEL", 0), ("MODEL-1", 1), ("worse", 0)):
        model = planted(seed=seed).model
        if name == "worse":
            with torch.no_grad():
                model.lm_head.weight.mul_(-20)
        model.save_pretrained(folder / name)
        tiny_tokenizer(adds_bos=True).save_pretrained(folder / name)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(autouse=True)
def here(workshop, monkeypatch):
    monkeypatch.chdir(workshop)
    monkeypatch.setenv("SINK_LENS_CACHE", str(workshop / "cache"))
    monkeypatch.setenv("TQDM_DISABLE", "0")  # quiet commands set it


@pytest.fixture(scope="module")
def done(workshop):
    """The answer of a command by the name of its row; it runs when it is first asked for, and what it reads before."""

    @functools.cache
    def answer(name):
        for word in shlex.split(COMMANDS[name].words):
            if word in COMMANDS and word != name:
                answer(word)
        before = {path for path in Path().rglob("*") if "cache" not in path.parts}
        with pytest.MonkeyPatch.context() as patch:
            if (
                name not in EVERY and not COMMANDS[name].page
            ):  # the page of its command is drawn for another row
                patch.setattr(html, "page_html", short_page)
            given = run(*words_of(name), "--json")
        assert given.exit_code == COMMANDS[name].code, given.output
        if "--dry-run" in name:
            assert before == {path for path in Path().rglob("*") if "cache" not in path.parts}
        assert given.stdout.count("\n") == 1
        folder = workshop / (name if COMMANDS[name].writes else ".")
        return SimpleNamespace(
            code=given.exit_code, found=json.loads(given.stdout), stderr=given.stderr, folder=folder
        )

    return answer


def files(folder):
    return {
        str(path): path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()
    }


def named(group, before=""):
    for name, command in group.commands.items():
        yield from (
            named(command, f"{name} ") if hasattr(command, "commands") else [f"{before}{name}"]
        )


EVERY = [*named(typer.main.get_command(cli.app))]


def test_every_command_is_asked():
    assert {name.split()[0] for name in COMMANDS} == set(EVERY)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_answers_writes_its_run_and_draws_a_page_that_was_left_out(
    done, name, monkeypatch
):
    given, asked = done(name), COMMANDS[name]
    # --json is one object on stdout, and a reader sees the rest.
    assert given.found["command"] == name.split()[0]
    assert set(asked.has.split()) <= set(given.found)
    assert ("dry_run" in given.found) == ("--dry-run" in name)
    assert asked.code != 2 or given.found["error"] in given.stderr.replace("\n", " ")
    assert re.search(asked.shows, given.stderr, flags=re.S), given.stderr
    assert "Traceback" not in given.stderr
    if "run" in given.found:
        assert given.found["run"] in given.stderr or given.found["report"] in given.stderr
    if (
        given.code != 2
        and asked.writes
        and "--dry-run" not in name
        and "columns" not in given.found
    ):
        # The run is whole, shows itself in a notebook, and its page and pictures are there.
        found = read_run(given.folder)
        assert (found.status, found.missing) == ("finished", [])
        assert f"{found.kind} (finished)" in found._repr_html_()
        page = unescape(Path(given.found["report"]).read_text(encoding="utf-8"))
        assert [text for text in asked.page if text not in page] == []
        assert "RunError" not in page
        assert all(path.read_bytes().startswith(b"\x89PNG") for path in given.folder.glob("*.png"))
    if name in EVERY and "report" in asked.has and asked.writes:
        is_drawn_again(given, name, monkeypatch)


GOES_ON = ("sweep", "isolate", "amplify", "train")
"""Commands that go on in the folder of a finished run, where there is nothing left to do."""


def is_drawn_again(given, name, monkeypatch):
    """A finished run is not run again; a page that a full disk left out is drawn by the same command, and no more."""
    words, page = words_of(name), given.folder / "report.html"
    before = tables(given.folder)
    again = run(*words)
    if name in GOES_ON:
        assert again.exit_code == 0
    else:
        assert (again.exit_code, "--overwrite" in again.stderr) == (2, True), again.output
    drawn = page.read_bytes()
    page.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(html, "page_html", short_page)
        patch.setattr(html, "write_part", full)
        first = run(*words)
    assert first.exit_code == 2, first.output
    assert "No space left" in first.stderr
    assert f"sink-lens report {name}" in first.stderr
    assert not page.exists()
    monkeypatch.setattr(html, "page_html", short_page)
    again = run(*words, "--quiet")
    assert again.exit_code == 0, again.output
    assert again.stdout.splitlines()[-1].endswith((name, "report.html", "drawn now"))
    assert page.stat().st_size >= 1000
    if name not in GOES_ON:  # which put their tables together again
        assert tables(given.folder) == before
    assert read_run(given.folder).status == "finished"
    page.write_bytes(drawn)


def short_page(*folders, group_by=()):
    """Instead of a page, which takes longer than the runs here."""
    return f"{PAGE_MARK.decode()} key_sink of {folders}" + 1000 * " "


def full(path, payload):
    """``write_part`` on a disk that has no room for a page."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def tables(folder):
    return {
        path.name: path.stat().st_mtime_ns for path in folder.iterdir() if path.suffix != ".html"
    }


def test_what_is_asked_of_a_patch_is_what_is_patched(done):
    frame = read_run(done("patch heads").folder).tables["patches"]
    assert [sorted(set(frame[name])) for name in ("layer", "position", "head")] == [
        [1],
        [2, 3],
        [1, 3],
    ]
    screened = read_run(done("patch screened").folder).tables
    assert (len(screened["check"]), "approximation" in screened["patches"]) == (5, True)
    assert (read_run(done("patch pairs").folder).tables["patches"]["n"] == 2).all()
    at_once = read_run(done("patch at once").folder)
    assert (len(at_once.tables["patches"]), (at_once.folder / "heatmap.png").exists()) == (1, False)
    plain = read_run(done("patch").folder)
    assert set(plain.tables["patches"]["layer"]) == {0, 1}
    assert plain.tables["summary"]["effect"].notna().all()
    assert plain.provenance["corrupted_sha256"] != plain.provenance["tokens_sha256"]


def test_a_switch_is_off_in_its_variant_alone(done):
    tables = read_run(done("contraction").folder).tables
    variants = tables["variants"].set_index(["measure", "variant"])
    off = next(variant for _, variant in variants.index if "mlp=False" in variant)
    assert variants.loc[("inter_by_mlp", off), "mean"] == pytest.approx(0, abs=1e-6)
    assert variants.loc[("inter_by_mlp", off), "n"] == 2
    assert (
        len(tables["agreement"]) == 2 * 6
    )  # pairs of four models, after the last layer and after the norm
    assert read_run(done("preference").folder).tables["models"]["weights_sha256"].nunique() == 2


def test_a_loss_above_its_bound_is_code_1_and_a_higher_bound_is_kept(done):
    assert done("card worse").found["within_bound"] is False
    again = run(*words_of("card worse"), "--most-loss", "1000", "--overwrite", "--quiet")
    assert (again.exit_code, again.stdout) == (0, "card worse\n")


@pytest.mark.parametrize("name", EVERY)
def test_help_fits_80_columns_and_names_no_types(name):
    text, _, examples = run(name, "--help", width=80).stdout.partition("\nExamples:")
    assert all(len(line) <= 80 for line in text.splitlines()), text
    assert not re.search("<(bool|str|path|int|float|list)", text), text
    assert "--json" in text
    assert "--quiet" in text
    assert "[dim]" not in examples
    assert name in run("--help").stdout


@pytest.mark.parametrize("name", EVERY)
def test_every_example_of_the_help_is_a_command_that_is_taken(name, tmp_path, monkeypatch):
    """Up to its configuration, whose own checks are made; nothing is run."""
    monkeypatch.chdir(tmp_path)
    for file in ("mine.txt", "corpus.txt", "my_pairs.csv"):
        Path(file).write_text("text")
    if name in ("sweep", "train"):
        Path(f"{name}.toml").write_text(run(name, "--example").stdout)
    command = typer.main.get_command(cli.app).commands[name]
    lines = [line.split("[dim]")[0] for line in (command.epilog or "").splitlines()]
    lines = [
        line[line.index("sink-lens ") :].split(" > ")[0] for line in lines if "sink-lens " in line
    ]
    assert len(lines) >= 2
    made, build = [], cli.options.build_config

    def stopped(*given, **rest):
        made.append(build(*given, **rest))
        raise typer.Exit

    monkeypatch.setattr("sink_lens.cli.options.build_config", stopped)
    for line in lines:
        assert run(*shlex.split(line)[1:]).exit_code == 0, line
    assert len(made) == sum("--example" not in line for line in lines)


LONG = "a" * 5000
REFUSED = {
    "trace RANDOM --threshold 1.5": "threshold is 1.5",
    "trace RANDOM --prompt a": "prompts",
    "trace RANDOM --sequnces 3": "--sequnces",
    "trace ~no-such-user/model": "no-such-user",
    f"isolate RANDOM --target-position {10**30}": "positions of isolate",
    "isolate RANDOM --length 1": "length is 1",
    "quantise RANDOM --format int3": "format is 'int3'; need one of int8_tensor",
    "quantise RANDOM --channels 1,two": "--channels is '1,two'",
    "tokens MODEL --tokens random --length 5000 --device cpu": "takes at most 256",
    "tokens RANDOM --gap 1": "gap is 1.0; need a number above 1",
    "patch MODEL": "give --clean and --corrupted",
    "patch MODEL --clean 'a cat' --corrupted 'an elephant' --metric loss": "need the same number",
    "patch PAIR --metric logit_difference": "need correct (--correct)",
    "patch PAIR --metric logit_difference --correct giraffe --incorrect a": "tokens behind 'a b c'; need one",
    "patch PAIR --metric norm": "give it with --metric-layers",
    "patch PAIR --layers 2-0": "--layers is '2-0'; need numbers and ranges such as 0-3,7",
    "patch PAIR --metric sink_mass --sink-position 99": "reads position 99",
    "patch PAIR --metric loss --sink-position 1": "sink_mass or norm or dominance",
    "patch PAIR --steps 5 --metric loss": "steps is 5, which nothing reads here: it is for approximate and screen",
    "sweep": "no file was given; need one that says what to sweep: sink-lens sweep --example > sweep.toml",
    "sweep unknown.toml": "has 'colour', which is not known; need some of",
    "sweep broken.toml": "cannot be read as a configuration of sweep",
    "SWEEP --engine slurm": "slurm",
    "sweep sweep.toml --model MODEL --device cuda:7": "cuda",
    "sweep sweep.toml 'a\u202egnp.exe\nerror: not ours'": "⟨U+202E⟩",
    "train": "no file was given; need one that says what to train: sink-lens train --example > train.toml",
    "train train.toml --set lr=3": "--set",
    "compare MODEL missing": "MODEL",
    "preference": "nothing to measure",
    "preference MODEL --seeds 0-3": "--seeds was given and no untrained model",
    "preference GPT2 --device @SUM(A1)": "device @SUM(A1) cannot be used here",
    "contraction GPT2 --length 8": "need 10 tokens",
    "contraction missing --device cpu": "is no folder and no file here",
    "fingerprint MODEL": "1 model was given",
    "fingerprint MODEL MODEL/../MODEL": "is there twice; need each model once",
    "fingerprint TWO --sequences 49": "49 sequences were asked for; need at least 50",
    "card RANDOM --columns loss": "--columns was given",
    "card RANDOM other --trace x": "--trace goes with the card of one model",
    "origin MODEL missing": "origin",
    f"trace {LONG}": "too long",
}
"""What is asked of each command and cannot be done -> what the error says."""
BEFORE_WEIGHTS = {
    "trace MODEL --sequences 1000000": "the text has 300,000 bytes",
    "trace RANDOM --floor nope=1": "nope",
    "trace RANDOM --target-position 30": "need one from 1 to 22",
    "isolate RANDOM --layers 9": "9 does not exist; need 0 to 4",
    "card MODEL --tokens random --length 5000": "takes at most",
    "sweep site.toml --model MODEL": "heart",
    "sweep layer.toml --model MODEL": "9",
    "sweep metric.toml --model MODEL": "9",
    "patch PAIR --site heart --metric loss": "heart",
    "patch PAIR --layers 0-9 --metric loss": "layers: 5 does not exist; need 0 to 4",
    "patch PAIR --by layer,head --metric loss": "by head is not possible",
    "patch MODEL --clean 'a b c' --corrupted 'a b c' --metric loss": "have the same tokens",
    "circuit MODEL --task file --pairs-file site.toml": "is no pair",
}
"""Refused from the headers of the files: no weight is read for it."""
REFUSED |= BEFORE_WEIGHTS


@pytest.fixture
def kept(tmp_path):
    """A run that must stay as it is."""
    folder = tmp_path / "kept"
    with create_run(folder, kind="trace", config={}, provenance={}) as writer:
        writer.write_text("table.csv", "a\n1\n")
        writer.write_text("gone.csv", "a\n1\n")
    (folder / "gone.csv").unlink()
    (folder / "notes.txt").write_text("mine")
    (folder / "deep").mkdir()
    (folder / "deep" / "weights.bin").write_text("weights")
    return folder


def is_refused(line, *options):
    """The command says why, in one message, and with no character that hides."""
    done = run(*meant(line), *options)
    assert (done.exit_code, isinstance(done.exception, SystemExit)) == (2, True), done.output
    assert REFUSED[line] in done.stderr
    assert "Traceback" not in done.stderr
    assert "\u202e" not in done.output
    assert not any(one.startswith("error: not ours") for one in done.output.splitlines())
    assert LONG not in line or len(done.stderr.strip().splitlines()[-1]) < 500


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_refused_says_why_and_leaves_no_folder(line, monkeypatch):
    if line in BEFORE_WEIGHTS:
        for module in ("models.inputs", "models.load", "patching.command"):
            refuses = lambda *args, **options: pytest.fail("the weights were read")  # noqa: E731
            monkeypatch.setattr(import_module(f"sink_lens.{module}"), "load", refuses)
    is_refused(line, "--out", "deep/run")
    assert not Path("deep").exists()


FIRST = {*{line.split()[0]: line for line in reversed(REFUSED)}.values()}
"""The first of each command: the others take the same code to a run that is to be overwritten."""


@pytest.mark.parametrize("line", first(REFUSED, stay=FIRST.__contains__))
def test_what_is_refused_leaves_the_run_that_it_would_overwrite(line, kept):
    (kept / "report.html").write_text("its page")
    before = files(kept)
    is_refused(line, "--out", kept, "--overwrite")
    assert files(kept) == before


@pytest.mark.filterwarnings("default:missing is left out")
def test_a_model_that_cannot_be_opened_is_left_out_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(html, "page_html", short_page)
    done = run("preference", "missing", *meant("GPT2 --length 16"), "--out", tmp_path / "run")
    assert done.exit_code == 0, done.stderr
    assert "missing is left out" in done.stderr
    assert read_run(tmp_path / "run").tables["models"]["error"].notna().tolist() == [True, False]


def test_an_option_that_would_do_nothing_is_refused():
    done = run("report", "RUN", "--only", "circuit")
    assert (done.exit_code, "only was given without figures" in done.stderr) == (2, True)


TOKENS = meant("tokens RANDOM")


def test_the_page_is_not_drawn_for_another_question_nor_left_beside_an_overwritten_run(
    tmp_path, monkeypatch
):
    def stopped(*folders, group_by=()):
        raise KeyboardInterrupt

    out = tmp_path / "run"
    monkeypatch.setattr(html, "page_html", stopped)
    first = run(*TOKENS, "--out", out)
    assert first.exit_code == 130
    assert f"sink-lens report {out}" in " ".join(first.stderr.split())
    assert "nothing was written" not in first.stderr
    other = run(*TOKENS, "--seed", 7, "--out", out)
    assert (other.exit_code, "sink-lens report" in other.stderr) == (2, True)
    (out / "report.html").write_text(short_page())
    assert run(*TOKENS, "--seed", 7, "--overwrite", "--out", out).exit_code == 130
    assert not (out / "report.html").exists()


@pytest.mark.parametrize(
    "name", ["run.json", "gone.csv", "notes.txt", "deep/weights.bin", "deep/../run.json"]
)
def test_a_page_is_not_written_over_a_file_of_a_run(kept, name):
    before = files(kept)
    done = run("report", kept, "--out", kept / name)
    assert done.exit_code == 0
    page = (kept / name).with_name(f"{(kept / name).name}.html")
    assert str(page) in done.stdout  # a page has an ending
    page.unlink()
    assert files(kept) == before
    page.mkdir()
    assert run("report", kept, "--out", page).exit_code == 0
    assert [one.name for one in page.iterdir()] == ["report.html"]


def test_a_page_is_not_written_through_a_link_to_a_file_of_a_run(kept, tmp_path):
    page = tmp_path / "page.html"
    page.symlink_to(kept / "run.json")
    before = files(kept)
    assert run("report", kept, "--out", page).exit_code == 2
    assert files(kept) == before


def test_figures_are_not_written_over_a_file_of_a_run_and_leave_the_page_where_they_are_refused(
    done, kept, tmp_path
):
    from sink_lens.report.export import save_figures

    drawn, _ = save_figures([done("isolate").folder], tmp_path / "figures")
    with create_run(tmp_path / "other", kind="sweep", config={}, provenance={}) as writer:
        writer.write_text(drawn[0].name, "a file of the run")
    with pytest.raises(InputError, match="belongs to the run"):
        save_figures([done("isolate").folder], tmp_path / "other")
    assert (tmp_path / "other" / drawn[0].name).read_text() == "a file of the run"
    (kept / "report.html").write_text("before")
    assert run("report", kept, "--figures", tmp_path / "more", "--format", "gif").exit_code == 2
    assert (kept / "report.html").read_text() == "before"


DOORS = {
    "trace RANDOM": ("chain.trace", "run_trace"),
    "SWEEP": ("sweeps.sweep", "sweep"),
    "train train.toml": ("training.train", "train"),
}
"""Commands that say how they go on -> the module and function that they call."""


def opened_by(monkeypatch, line, function):
    module, name = DOORS[line]
    monkeypatch.setattr(import_module(f"sink_lens.{module}"), name, function)


@pytest.mark.parametrize("line", DOORS)
def test_an_interrupt_says_what_is_kept_and_an_error_is_one_message(line, tmp_path, monkeypatch):
    folder = tmp_path / ("a long name of a folder " * 5).strip()
    raised = [
        KeyboardInterrupt(),
        KeyboardInterrupt(),
        RunError("runs/a holds a run that differs in mode"),
    ]
    raised[1].add_note(
        f"what is finished is in {folder}; the same command with --out {folder} goes on"
    )  # the writer's

    def stopped(*given, **options):
        raise raised.pop(0)

    opened_by(monkeypatch, line, stopped)
    words = [*meant(line), "--out", folder]
    first = run(*words)
    assert first.exit_code == 130
    assert re.fullmatch(
        "(stopped; |interrupted: )(nothing was written|what is finished is in .*)\n", first.stderr
    )
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    second = run(*words)
    assert second.exit_code == 130
    assert re.search("(finished|saved).*same command", second.stderr)
    assert str(folder) in second.stderr
    assert second.stderr.count("\n") == 1
    third = run(*words)
    assert (third.exit_code, third.stderr) == (
        2,
        "error: runs/a holds a run that differs in mode\n",
    )


def test_failed_cells_are_code_1_and_computed_again_when_that_is_asked(tmp_path, monkeypatch):
    from sink_lens.edits import named_edits as kinds
    from sink_lens.edits.constructors import edit

    state = {"broken": True}

    def fragile(place, references):
        def change(x, at):
            if state["broken"] and place.part.heads == (2,) and at.layer == 1:
                raise ValueError("no luck")
            return torch.zeros_like(x)

        return edit(place.part.site, change, **place.arguments)

    kind = kinds.Kind(meaning="breaks", make=fragile)
    monkeypatch.setattr(kinds, "KINDS", kinds.KINDS | {"zero": kind})
    monkeypatch.setattr("sink_lens.sweeps.grid.KINDS", kinds.KINDS)
    monkeypatch.setattr(html, "page_html", short_page)
    file = tmp_path / "heads.toml"
    file.write_text("controls = 0\n" + FILES["sweep.toml"] + 'layers = "0-1"\n')
    words = ["sweep", file, "--model", "MODEL", "--device", "cpu", "--out", tmp_path / "out"]
    first = run(*words)
    assert first.exit_code == 1
    assert first.stderr.endswith(
        "failed: zero head output (z), layer 1, head 2: ValueError: no luck\n"
    )
    assert "1 edit failed; the table has the reasons." in first.stdout
    state["broken"] = False
    quiet = run(*words, "--quiet")
    assert (quiet.exit_code, quiet.stdout) == (1, f"{tmp_path / 'out'}\n")
    again = run(*words, "--retry-failed")
    assert again.exit_code == 0
    assert " failed" not in again.stdout


@pytest.mark.parametrize("name", ["circuit", "patch", "sweep"])
def test_a_shard_that_is_not_the_last_says_that_others_are_missing(name, workshop, tmp_path):
    out = tmp_path / "out"
    found = run(*words_of(name)[:-2], "--out", out, "--shard", "1/2")
    assert (found.exit_code, found.stdout) == (
        0,
        f"shard 1/2 is done, others are not yet: sink-lens report {out} --status\n",
    )


def test_options_that_no_configuration_has_reach_what_runs(monkeypatch):
    calls = []

    def called(*given, config=None, **options):
        calls.append(
            (
                config or given[0],
                {name: str(value) if name == "out" else value for name, value in options.items()},
            )
        )
        raise RunError("called")

    for line in DOORS:
        opened_by(monkeypatch, line, called)
    run("sweep", "sweep.toml", "--shard", "1/2")
    run(
        "sweep",
        "sweep.toml",
        *shlex.split("--device cpu --out a --engine ray --workers 3 --overwrite --retry-failed"),
    )
    run("train", "train.toml", "--seed", 3)
    run(
        "train",
        "train.toml",
        "--seed",
        3,
        "--attention",
        "sigmoid",
        "--out",
        "a",
        "--overwrite",
        "--quiet",
    )
    (first, divided), (second, chosen), (_, begun), (fourth, quiet) = calls
    assert (first, divided) == (
        read_sweep("sweep.toml"),
        {"out": "runs/sweep", "shard": "1/2", "overwrite": False, "progress": True},
    )
    assert (second.engine, second.workers, second.retry_failed) == ("ray", 3, True)
    assert chosen == {"out": "a", "shard": None, "overwrite": True, "progress": True}
    assert begun == {"out": "runs/train-3", "overwrite": False, "progress": True}
    assert (fourth.attention, fourth.seed, fourth.d_model) == ("sigmoid", 3, 32)
    assert quiet == {"out": "a", "overwrite": True, "progress": False}


def test_a_training_of_another_model_is_refused_in_its_folder(done):
    folder = done("train text").folder
    other = run("train", "text.toml", "--out", folder, "--value-norm", "shared")
    assert (other.exit_code, "value_norm: none there, shared here" in other.stderr) == (2, True)


def test_watch_says_when_the_sink_was_born(monkeypatch, tmp_path):
    module = import_module("sink_lens.training.watch")
    monkeypatch.setattr(module, "watch", lambda folder, **options: watched([0.0, 0.05, 0.6]))
    folder = write_run(tmp_path / "run", [6.0, 5.0, 4.0, 3.0])
    done = run("watch", folder)
    assert done.exit_code == 0, done.stderr
    assert "the sink was born between 640 and 1.28k tokens (step 20)" in done.stdout
    assert "0.3" in done.stdout.splitlines()[-4]  # half of the mass
    assert done.stdout.splitlines()[-1] == str(folder)
    quiet = run("watch", folder, "--threshold", 0.1, "--quiet")
    assert len(quiet.stdout.splitlines()) == 1
    assert "(step 10)" in quiet.stdout  # 5% over 0.1 at step 10 already, and no less after it
