"""Options made from a configuration: by hand, from a file, and the same from Python as from the command line."""

import ast
import json
import re
import types
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

import pytest
import typer
from typer.testing import CliRunner

import sink_lens
from sink_lens import cli
from sink_lens.chain.config import TraceConfig
from sink_lens.cli.options import (
    add_config_options,
    build_config,
    off_option_name,
    option_name,
    say_with_options,
)
from sink_lens.configuration import allowed_texts, make_config
from sink_lens.errors import InputError
from sink_lens.kinds import all_kinds
from sink_lens.lazy import import_object
from sink_lens.patching.config import PatchConfig
from sink_lens.patching.run_pair import merge_patch_config
from sink_lens.report.config import ReportConfig
from sink_lens.signatures import field_docs
from sink_lens.studies.config import CardConfig, QuantiseConfig
from sink_lens.sweeps.config import SweepConfig, sweep_config
from sink_lens.training.config import TrainConfig, WatchConfig

COMMANDS = {kind.name: import_object(kind.config) for kind in all_kinds().values() if kind.config}
COMMANDS |= {"report": ReportConfig}
OF_A_MODEL = ("trace", "patch")
EDITS = [{"site": "z", "heads": "each"}]
NEEDED = {WatchConfig: {"run": "a"}, TrainConfig: {"seed": 0}}
"""What a command cannot do without; a training asks for a file or an option."""
RUNNER = CliRunner(env={"COLUMNS": "300", "TERM": "dumb"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Toy:
    """A configuration by hand."""

    model: str = field(default="tiny", metadata={"positional": True})
    """The model."""
    many_words: int = 3
    """How
    many words, as ``n[0]``."""
    share: float | None = None
    """A share."""
    loud: bool = True
    """Say it loudly."""
    names: tuple[str, ...] = field(default=(), metadata={"option": "name"})
    """A name; repeat."""
    kind: Literal["a", "b"] = "a"
    """Its kind."""
    layers: tuple[int, ...] | None = field(default=None, metadata={"written": "ranges"})
    """In which layers."""
    factors: tuple[float, ...] = field(default=(1.0, 2.5), metadata={"written": "commas"})
    """Factors."""


@pytest.fixture
def toy():
    """A command of the toy: how it is run, and what it was called with."""
    app, calls = typer.Typer(rich_markup_mode="rich"), []

    @app.command()
    @add_config_options(Toy)
    def command(config: Toy, quiet: bool = False) -> None:
        """What the command does."""
        calls.append((config, quiet))

    return (lambda *words: RUNNER.invoke(app, [*map(str, words)])), calls


def test_every_kind_of_field_is_an_option(toy):
    run, calls = toy
    done = run(
        *(
            "big",
            "--many-words",
            "7",
            "--share",
            "0.5",
            "--no-loud",
            "--name",
            "x",
            "--name",
            "y z",
            "--kind",
            "b",
        ),
        *("--layers", "0-2,5", "--factors", "3,0.5", "--quiet"),
    )
    assert done.exit_code == 0, done.output
    config = Toy(
        model="big", many_words=7, share=0.5, loud=False, names=("x", "y z"), kind="b", layers=(0, 1, 2, 5),
        factors=(3.0, 0.5),
    )  # fmt: skip
    assert calls == [(config, True)]
    assert run("--layers", "0-2", "--layers", 7, "--factors", "1,2", "--factors", 3).exit_code == 0
    assert (calls[-1][0].layers, calls[-1][0].factors) == ((0, 1, 2, 7), (1.0, 2.0, 3.0))


def test_help_is_the_docstring_with_the_default(toy):
    run, _ = toy
    lines = run("--help").stdout
    for words in (
        "What the command does.",
        "How many words, as n[0]. [default: 3]",
        "--loud",
        "--no-loud",
        "a|b",
        "N-N",
        "[default: 1,2.5]",
    ):
        assert words in " ".join(lines.split()), words
    assert "[default: None]" not in lines


def test_a_file_gives_any_field_and_an_option_wins(toy, tmp_path):
    run, calls = toy
    file = tmp_path / "toy.toml"
    file.write_text(
        'many_words = 9\nnames = ["x"]\nlayers = "1-2"\nloud = false\nshare = 1\nfactors = [4, 5]\n'
    )
    assert run("--config", file, "--many-words", "3").exit_code == 0
    assert calls == [
        (Toy(names=("x",), layers=(1, 2), loud=False, share=1.0, factors=(4.0, 5.0)), False)
    ]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("many_word = 3", "toy.toml has 'many_word', which is not known; did you mean many_words?"),
        ("many_words = 'x'", "many_words is 'x'; need a whole number"),
        ("many_words = true", "many_words is True; need a whole number"),
        ("loud = 1", "loud is 1; need true or false"),
        ("names = 'x'", "names is 'x'; need a list"),
        ("kind = 3", "kind is 3; need one of a, b"),
        ("factors = '1,two'", "factors is '1,two'; need numbers with commas"),
    ],
)
def test_what_a_file_cannot_say_is_refused(toy, tmp_path, line, text):
    run, calls = toy
    (tmp_path / "toy.toml").write_text(line)
    error = run("--config", tmp_path / "toy.toml").exception
    assert isinstance(error, InputError)
    assert text in str(error)
    assert calls == []


def test_lists_paths_and_whole_numbers_from_python_are_taken(tmp_path):
    config = make_config(
        Toy, None, {"layers": range(2), "factors": [1, 2], "share": 1, "model": tmp_path}
    )
    assert config == Toy(layers=(0, 1), factors=(1.0, 2.0), share=1.0, model=str(tmp_path))
    assert make_config(Toy, config, {"share": None}).share is None
    with pytest.raises(
        InputError, match="has 'many_word', which is not known; did you mean many_words"
    ):
        make_config(Toy, None, {"many_word": 3})


OTHERS = {str: "other", int: 7, float: 0.25, bool: True}
SPECIAL = {
    "factors": (0.5, 3.0),
    "text": None,
    "centres": ("none",),
    "tokens": "repeated",
    "intervention_length": 17,
    "growth_factor": 3.5,
    "dominance_threshold": 3.5,
    "floors": ("key_sink=0.5", "intervention=0.5"),
    "decides": "shuffled",
    "alpha": 0.02,
    "sequences": 70,
    "length": 18,
    "draws": 90,
    "relabellings": 90,
    "coordinates": 9,
    "untrained": ("gpt2", "llama"),
    "d_model": 24,
    "n_heads": 4,
    "n_kv_heads": 2,
    "accumulation": 2,
    "batch": 6,
    "steps": 12,
    "warmup": 3,
    "checkpoints": (1, 2),
    "betas": (0.5, 0.25),
    "min_lr": 0.125,
    "value_norm": "per_head",
    "device": "cuda",
    "fsdp": None,  # muon does not go with it
    "prompts_file": None,  # it excludes the text
    "imports": (),
    **dict.fromkeys(("gap", "dimension_factor", "least_share", "least_norm"), 7.5),
    **dict.fromkeys(("sink_threshold", "massive_threshold"), 7.5),
    "sites": ("z", "attn_in"),
    "keep": (0, 3),
}
"""Values of fields whose checks refuse an arbitrary value."""
OF_KIND = {CardConfig: {"trace": None, "most_loss": 0.5}, ReportConfig: {"group_by": ("dtype",)}}
"""The same, where a name means something else in one configuration."""


def another(one):
    """A value of a field that is not its default."""
    if one.name in SPECIAL:
        return SPECIAL[one.name]
    if choices := allowed_texts(one.type):
        return choices[min(1, len(choices) - 1)]
    if one.type is bool:
        return not one.default
    for plain, value in OTHERS.items():
        if one.type in (plain, plain | None):
            return value
        if one.type in (tuple[plain, ...], tuple[plain, ...] | None):
            return (value, value) if plain is not int else (1, 2)
    raise AssertionError(one)


def options(kind):
    return [one for one in fields(kind) if "file_only" not in one.metadata]


def changed(kind):
    """Every field of a command's configuration, at another value than its default; a text would exclude prompts."""
    given = {one.name: another(one) for one in options(kind)}
    given |= {name: value for name, value in OF_KIND.get(kind, {}).items() if name in given}
    if "tokens" in given:
        given["prompts"] = ()
    if kind is PatchConfig:  # a file would exclude prompts and answers
        del given["pairs_file"], given["answers_as"]
    return {name: value for name, value in given.items() if value not in (None, ())}


def default(kind):
    """The configuration of a command that was told what it needs."""
    return sweep_config({"edits": EDITS}) if kind is SweepConfig else kind(**NEEDED.get(kind, {}))


def words(kind, given):
    """The same on a command line."""
    found = []
    for one in options(kind):
        if one.name not in given:
            continue
        value, option = given[one.name], option_name(one)
        if one.metadata.get("positional"):
            found += [*value] if isinstance(value, tuple) else [value]
        elif isinstance(value, bool):
            found.append(option if value else off_option_name(one))
        elif isinstance(value, tuple):
            if one.metadata.get("written") in ("ranges", "commas"):
                found += [option, ",".join(map(str, value))]
            else:
                found += [part for entry in value for part in (option, entry)]
        else:
            found += [option, value]
    return [str(word) for word in found]


@pytest.fixture
def read(monkeypatch, tmp_path):
    """The configuration that a command line makes; nothing is run."""
    made = []

    def stopped(*given, **rest):
        made.append(build_config(*given, **rest))
        raise typer.Exit

    monkeypatch.setattr("sink_lens.cli.options.build_config", stopped)
    (tmp_path / "least.json").write_text(json.dumps({"edits": EDITS}))

    def run(command, *arguments, file=None):
        made.clear()
        least = tmp_path / "least.json" if command == "sweep" else None
        given = ["--config", file or least] if file or least else []
        done = RUNNER.invoke(cli.app, [command, *map(str, (*arguments, *given))])
        assert done.exit_code == 0, (done.output, done.exception)
        return made[0]

    return run


def from_python(command, name, given):
    """What the Python call of a command makes of a model's name and fields."""
    kind, rest = COMMANDS[command], {one: value for one, value in given.items() if one != "model"}
    if command == "trace":
        return make_config(TraceConfig, None, rest | {"model": name}, where="trace")
    if command == "patch":
        return merge_patch_config(None, lens=types.SimpleNamespace(name=name), fields=rest)
    return make_config(kind, None, rest | {"model": name})


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_has_every_field_with_its_docstring(command):
    kind, found = COMMANDS[command], typer.main.get_command(cli.app).commands[command]
    params = {one.name: one for one in found.params}
    docs = field_docs(kind)
    shown = " ".join(RUNNER.invoke(cli.app, [command, "--help"]).stdout.replace("│", "").split())
    for one in options(kind):
        if not one.metadata.get("positional"):
            assert option_name(one) in params[one.name].opts
            assert option_name(one) in shown
        opening = docs[one.name].replace("``", "").split()[:4]
        assert " ".join(opening) in shown, one.name
    assert "--config" in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_line_a_file_and_python_make_the_same_configuration(command, read, tmp_path):
    kind, given = COMMANDS[command], changed(COMMANDS[command])
    more = {"edits": EDITS} if kind is SweepConfig else {}
    made = read(command, *words(kind, given))
    assert made == (sweep_config(more, **given) if more else kind(**given))
    (tmp_path / "all.json").write_text(json.dumps(given | more))
    assert read(command, file=tmp_path / "all.json") == made
    if command in OF_A_MODEL:
        assert from_python(command, given["model"], given) == made
    assert read(command, *words(kind, NEEDED.get(kind, {}))) == default(kind)
    at_default = [
        one.name
        for one in options(kind)
        if getattr(made, one.name) == getattr(default(kind), one.name)
    ]
    assert set(at_default) <= {
        *("text", "prompts", "prompts_file", "pairs_file", "answers_as", "imports", "fsdp", "trace")
    }  # others exclude them


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_key_of_a_file_is_refused_with_the_nearest_name(command, tmp_path):
    name = options(COMMANDS[command])[-1].name
    wrong = f"{name[:-1]}_"
    (tmp_path / "all.toml").write_text(f"{wrong} = 3")
    done = RUNNER.invoke(cli.app, [command, "--config", str(tmp_path / "all.toml")])
    assert done.exit_code == 2
    assert f"all.toml has {wrong!r}, which is not known; did you mean {name}?" in done.stderr


def test_two_files_are_refused(tmp_path):
    (tmp_path / "two.toml").write_text("size = 'small'")
    done = RUNNER.invoke(cli.app, ["train", "one.toml", "--config", str(tmp_path / "two.toml")])
    assert done.exit_code == 2
    assert "two files were given" in done.stderr


def test_floors_are_written_as_a_table_or_as_pairs(read, tmp_path):
    (tmp_path / "floors.toml").write_text("[floors]\nkey_sink = 0.5\nintervention = 1\n")
    config = read("trace", file=tmp_path / "floors.toml")
    assert config == read("trace", "--floor", "key_sink=0.5", "--floor", "intervention=1")
    assert config == make_config(
        TraceConfig, None, {"floors": {"key_sink": 0.5, "intervention": 1}}
    )
    assert config.floors_by_link == {"key_sink": 0.5, "intervention": 1.0}
    assert config.changed_thresholds == ("floors",)
    assert TraceConfig(threshold=0.2, growth_factor=3.0).changed_thresholds == (
        "threshold",
        "growth_factor",
    )
    assert TraceConfig(sequences=3, controls=19).changed_thresholds == ()
    with pytest.raises(InputError, match="a floor is 'key_sink=much'; need LINK=NUMBER"):
        TraceConfig(floors=("key_sink=much",))


def test_a_table_of_the_tokens_is_the_same_as_its_fields(read, tmp_path):
    (tmp_path / "table.toml").write_text("[tokens]\nkind = 'random'\nlength = 9\n")
    assert read("trace", "--sequences", 3, file=tmp_path / "table.toml") == TraceConfig(
        tokens="random", length=9, sequences=3
    )
    (tmp_path / "table.toml").write_text("[tokens]\nlenght = 9\n")
    done = RUNNER.invoke(cli.app, ["trace", "--config", str(tmp_path / "table.toml")])
    assert "table.toml has 'lenght', which is not known; did you mean length?" in done.stderr


def test_the_configuration_of_another_function_is_refused():
    with pytest.raises(InputError, match="TraceConfig; need a QuantiseConfig"):
        make_config(QuantiseConfig, TraceConfig(), {})


def test_an_error_names_arguments_in_python_and_options_on_the_command_line():
    given = types.SimpleNamespace(name="COMMANDLINE")
    context = types.SimpleNamespace(
        command=typer.main.get_command(cli.app).commands["trace"],
        get_parameter_source={"growth_factor": given, "model": given}.get,
    )
    for text, shown in (
        ("need dtype='auto', or less", "need --dtype auto, or less"),
        ("give out='runs/a b'", "give --out runs/a b"),
        ("without it (random_init=False)", "without it (--no-random-init)"),
        ("ask for fewer: sequences=...", "ask for fewer: --sequences"),
        ("load(model, colour='red') and n=3", "load(model, colour='red') and n=3"),
        (
            "growth_factor is 0.5; need a factor above 1",
            "--growth-factor is 0.5; need a factor above 1",
        ),
        ("threshold is 7; need less", "threshold is 7; need less"),  # a file has it
        ("model is missing", "model is missing"),  # no option
    ):
        assert say_with_options(text, context) == shown


COMMAND = r"(sink-lens|sbatch|torchrun|pip|llama-gguf-split)\b[^;)]*"


def test_no_message_below_the_command_line_names_an_option():
    found = []
    for path in Path(sink_lens.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))) if "cli" not in path.parts else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Error"):
                said = re.sub(COMMAND, "", " ".join(map(ast.unparse, node.args)))
                found += [(path.name, said)] if re.search(r"[ ('\"]--[a-z]", said) else []
    assert found == []
