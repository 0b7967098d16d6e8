"""Options made from a configuration: by hand, from a file, and the same from Python as from the command line."""

import dataclasses
import json
import types
from dataclasses import dataclass, field, fields
from typing import get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from sink_lens import cli
from sink_lens.chain.config import TraceConfig
from sink_lens.chain.trace import _config_of
from sink_lens.cli.options import configured, option_of
from sink_lens.configuration import field_docs, with_fields
from sink_lens.errors import InputError
from sink_lens.patching.activation import patch_config
from sink_lens.patching.config import PatchConfig
from sink_lens.studies.config import AblateConfig, AmplifyConfig, IsolateConfig
from sink_lens.studies.study import asked

COMMANDS = {
    "trace": TraceConfig,
    "isolate": IsolateConfig,
    "amplify": AmplifyConfig,
    "ablate": AblateConfig,
    "patch": PatchConfig,
}
FROM_PYTHON = ("trace", "isolate", "amplify", "ablate", "patch")
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
    kind: str = field(default="a", metadata={"choices": ("a", "b")})
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
    @configured(Toy)
    def command(config: Toy, quiet: bool = False) -> None:
        """What the command does."""
        calls.append((config, quiet))

    return (lambda *words: RUNNER.invoke(app, [*map(str, words)])), calls


def test_without_options_every_field_has_its_default(toy):
    run, calls = toy
    assert run().exit_code == 0
    assert calls == [(Toy(), False)]


def test_every_kind_of_field_is_an_option(toy):
    run, calls = toy
    done = run(
        *("big", "--many-words", "7", "--share", "0.5", "--no-loud", "--name", "x", "--name", "y z", "--kind", "b"),
        *("--layers", "0-2,5", "--factors", "3,0.5", "--quiet"),
    )
    assert done.exit_code == 0, done.output
    config = Toy(
        model="big",
        many_words=7,
        share=0.5,
        loud=False,
        names=("x", "y z"),
        kind="b",
        layers=(0, 1, 2, 5),
        factors=(3.0, 0.5),
    )
    assert calls == [(config, True)]


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
    file.write_text('many_words = 9\nnames = ["x"]\nlayers = "1-2"\nloud = false\nshare = 1\nfactors = [4, 5]\n')
    assert run("--config", file, "--many-words", "3").exit_code == 0
    assert calls == [(Toy(names=("x",), layers=(1, 2), loud=False, share=1.0, factors=(4.0, 5.0)), False)]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("many_word = 3", "toy.toml has 'many_word', which is not known; did you mean many_words?"),
        ("name = ['x']", "did you mean names?"),
        ("many_words = 'x'", "many_words is 'x'; need a whole number"),
        ("many_words = true", "many_words is True; need a whole number"),
        ("loud = 1", "loud is 1; need true or false"),
        ("names = 'x'", "names is 'x'; need a list"),
        ("names = 3", "names is 3; need a list"),
        ("kind = 3", "kind is 3; need a text"),
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


def test_an_option_that_cannot_be_read_is_named(toy):
    run, _ = toy
    assert str(run("--layers", "3-1").exception).startswith("--layers is '3-1'")


def test_lists_paths_and_whole_numbers_from_python_are_taken(tmp_path):
    config = with_fields(Toy, None, {"layers": range(2), "factors": [1, 2], "share": 1, "model": tmp_path})
    assert config == Toy(layers=(0, 1), factors=(1.0, 2.0), share=1.0, model=str(tmp_path))
    assert with_fields(Toy, config, {"share": None}).share is None


def test_docs_are_read_from_the_classes_a_class_is_made_from():
    docs = field_docs(TraceConfig)
    assert docs["sequences"] == "How many sequences."
    assert docs["controls"].startswith("Draws of every random control")


# --- every command

OTHERS = {str: "other", int: 7, float: 0.25, bool: True}
SPECIAL = {"factors": (0.5, 3.0), "text": None, "centres": ("none",), "tokens": "repeated", "intervention_length": 17}


def another(one, kind):
    """A value of a field that is not its default."""
    if one.name in SPECIAL:
        return SPECIAL[one.name]
    if one.name in ("growth_factor", "dominance_threshold"):
        return 3.5
    if choices := one.metadata.get("choices"):
        return choices[1]
    if one.type is bool or kind is bool:
        return not one.default
    for plain, value in OTHERS.items():
        if kind in (plain, plain | None):
            return value
        if kind in (tuple[plain, ...], tuple[plain, ...] | None):
            return (value, value) if plain is not int else (1, 2)
    raise AssertionError(kind)


def changed(kind):
    """Every field of a command's configuration, at another value than its default; a text would exclude prompts."""
    hints = get_type_hints(kind)
    given = {one.name: another(one, hints[one.name]) for one in fields(kind)}
    if "tokens" in given:
        given["prompts"] = ()
    return {name: value for name, value in given.items() if value not in (None, ())}


def words(kind, given):
    """The same on a command line."""
    found = []
    for one in fields(kind):
        if one.name not in given:
            continue
        value, option = given[one.name], option_of(one)
        if one.metadata.get("positional"):
            found += [*value] if isinstance(value, tuple) else [value]
        elif isinstance(value, bool):
            found.append(option if value else f"--no-{option[2:]}")
        elif isinstance(value, tuple):
            if one.metadata.get("written"):
                found += [option, ",".join(map(str, value))]
            else:
                found += [part for entry in value for part in (option, entry)]
        else:
            found += [option, value]
    return [str(word) for word in found]


@pytest.fixture
def read(monkeypatch):
    """The configuration that a command line makes; nothing is run."""
    made = []

    def stopped(*given, **options):
        made.append(with_fields(*given, **options))
        raise typer.Exit

    monkeypatch.setattr("sink_lens.cli.options.with_fields", stopped)

    def run(*arguments):
        made.clear()
        done = RUNNER.invoke(cli.app, [*map(str, arguments)])
        assert done.exit_code == 0, (done.output, done.exception)
        return made[0]

    return run


def from_python(command, name, given):
    """What the Python call of a command makes of a model's name and fields."""
    kind, rest = COMMANDS[command], {one: value for one, value in given.items() if one != "model"}
    if command == "trace":
        return _config_of(name, given=None, fields=rest)
    if command == "patch":
        return patch_config(None, lens=types.SimpleNamespace(name=name), metric=None, fields=rest)
    return asked(kind, name, config=None, tokens=None, fields=rest)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_field_is_out_of_reach_of_the_command_line(command):
    options = {option for one in typer.main.get_command(cli.app).commands[command].params for option in one.opts}
    kind = COMMANDS[command]
    for one in fields(kind):
        name = one.name if one.metadata.get("positional") else option_of(one)
        assert name in options, name
    assert "--config" in options
    assert set(field_docs(kind)) >= {one.name for one in fields(kind)}  # every option has a help text


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_line_a_file_and_python_make_the_same_configuration(command, read, tmp_path):
    kind, given = COMMANDS[command], changed(COMMANDS[command])
    made = read(command, *words(kind, given))
    assert made == kind(**given)
    (tmp_path / "all.json").write_text(json.dumps(given))
    assert read(command, "--config", tmp_path / "all.json") == made
    if command in FROM_PYTHON:
        assert from_python(command, given["model"], given) == made
    assert read(command) == kind()
    at_default = [one.name for one in fields(kind) if getattr(made, one.name) == getattr(kind(), one.name)]
    assert set(at_default) <= {"text", "prompts"}  # these two exclude --tokens


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_key_of_a_file_is_refused_with_the_nearest_name(command, tmp_path):
    (tmp_path / "all.toml").write_text("sead = 3")
    done = RUNNER.invoke(cli.app, [command, "--config", str(tmp_path / "all.toml")])
    assert done.exit_code == 2
    assert "all.toml has 'sead', which is not known; did you mean seed?" in done.stderr


@pytest.mark.parametrize("command", FROM_PYTHON)
def test_an_unknown_field_from_python_is_refused_with_the_nearest_name(command):
    with pytest.raises(InputError, match=f"{command} has 'sead', which is not known; did you mean seed"):
        from_python(command, "m", {"sead": 3})


def test_a_study_takes_over_what_it_shares_with_a_trace():
    config = TraceConfig(model="m", sequences=20, threshold=0.2, intervention_length=32, position=9, controls=7)
    study = asked(AmplifyConfig, config, config=None, tokens=None, fields={"factors": [3]})
    assert (study.position, study.factors, study.threshold) == (None, (3.0,), 0.2)
    assert study.question() == dataclasses.replace(config, position=None, controls=5)
    assert asked(AblateConfig, config, config=None, tokens="random", fields={}).question().controls == 7


def test_two_configurations_are_refused():
    with pytest.raises(InputError, match="two configurations"):
        asked(AblateConfig, AblateConfig(), config=AblateConfig(), tokens=None, fields={})
