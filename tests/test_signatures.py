"""A public function says its options: in its signature, its docstring, the stub beside its package and a notebook."""

import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from IPython.core.completer import IPCompleter, provisionalcompleter

import sink_lens
from sink_lens import circuits, edits, identity, measures, patching, studies, sweeps, training
from sink_lens.arguments import check_calls
from sink_lens.circuits.config import OF_A_RUN, CircuitConfig
from sink_lens.errors import InputError
from sink_lens.patching.config import PatchConfig
from sink_lens.signatures import LOADING, field_docs, show_options, takes
from tools.stubs import PACKAGE, stub_text

ROOMS = (
    sink_lens,
    circuits,
    edits,
    edits.metrics,
    identity,
    measures,
    patching,
    studies,
    sweeps,
    training,
)
PUBLIC = {
    f"{room.__name__}.{name}": one
    for room in ROOMS
    for name in getattr(room, "__all__", ())
    if inspect.isfunction(one := getattr(room, name))
}


@dataclass(frozen=True)
class Options:
    """Options of a function of this file."""

    layers: tuple[int, ...] | None = None
    """Layers, as --layers 0-3 gives them."""
    model: str = ""
    """Not for Python."""
    seed: int = 0
    """Seed."""


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("__init__.pyi")), ids=lambda path: path.parent.name
)
def test_a_stub_is_what_the_tool_writes(path: Path):
    assert stub_text(path) == path.read_text(encoding="utf-8")


def test_a_model_is_called_model_by_functions_and_methods():
    classes = {
        one
        for room in ROOMS
        for name in room.__all__
        if inspect.isclass(one := getattr(room, name))
    }
    methods = {
        f"{one.__name__}.{name}": function
        for one in classes
        for name, function in inspect.getmembers(one, callable)
        if not name.startswith("_") and (inspect.isfunction(function) or inspect.ismethod(function))
    }
    assert len(methods) > 50
    assert [
        name
        for name, one in (PUBLIC | methods).items()
        if "lens" in inspect.signature(one).parameters
    ] == []


def test_a_training_has_no_model_to_take_so_that_its_configuration_is_named():
    with pytest.raises(InputError, match="positional"):
        training.train(training.TrainConfig(), out="nowhere")


@pytest.mark.parametrize("name", PUBLIC)
def test_no_public_function_hides_its_options(name):
    parameters = inspect.signature(PUBLIC[name]).parameters.values()
    hidden = [one.name for one in parameters if one.kind is inspect.Parameter.VAR_KEYWORD]
    own = {
        "sink_lens.sweeps.cell_of": ["columns"],
        "sink_lens.edits.metrics.on_logits": ["by_sequence"],
    }
    assert hidden == own.get(
        name, []
    )  # names of the user's: columns of a table, parameters of a function


def test_every_bar_is_asked_for_unless_somebody_says_no():
    bars = {
        name: found
        for name, one in PUBLIC.items()
        if (found := inspect.signature(one).parameters.get("progress"))
    }
    assert {
        "sink_lens.run_with",
        "sink_lens.stream",
        "sink_lens.capture",
        "sink_lens.trace",
    } <= set(bars)
    assert [name for name, one in bars.items() if one.default is not True] == []


def test_options_are_keyword_only_with_type_and_default_and_their_own_docstring():
    @takes(Options, leave_out=("model",))
    def function(x: int, *, seed: int = 3, **fields: object) -> None:
        """Do it.

        Args:
            x: a number.
            seed: own.
            **fields: those of the
                configuration.

        Raises:
            ValueError: never.
        """
        return x, seed, fields

    shown = check_calls(function)
    show_options(shown, function)
    layers = inspect.signature(shown).parameters["layers"]
    assert (layers.kind, layers.default, str(layers.annotation)) == (
        layers.KEYWORD_ONLY,
        None,
        "Iterable[int] | None",
    )
    assert [*inspect.signature(shown).parameters] == ["x", "seed", "layers"]
    assert (
        "    seed: own.\n    layers: Layers, as layers 0-3 gives them.\n\nRaises:" in shown.__doc__
    )
    assert shown(1, layers=(2,)) == (1, 3, {"layers": (2,)})  # only what was given is passed on


@pytest.mark.parametrize("option", LOADING)
def test_options_of_loading_are_those_of_load_alone(option):
    for function in (
        sink_lens.trace,
        sink_lens.sweep,
        patching.patch,
        circuits.run,
        studies.card,
        studies.sink_tokens,
    ):
        assert option not in inspect.signature(function).parameters
        with pytest.raises(InputError, match=rf"load\(model, {option}="):
            function("a model", **{option: "cpu"})


def test_patch_and_find_show_every_field_that_is_for_python():
    for function, config, hidden in (
        (
            patching.patch,
            PatchConfig,
            {"model", "approximate", "check", *LOADING},
        ),  # attribution_patch does it
        (circuits.find, CircuitConfig, {"model", *LOADING, *OF_A_RUN}),
    ):
        shown = set(inspect.signature(function).parameters)
        assert set(field_docs(config)) - hidden <= shown
        assert all(f"    {name}: " in function.__doc__ for name in set(field_docs(config)) - hidden)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("patching.patch(m, dire", "direction="),
        ("circuits.find(m, abl", "ablation="),
        ("sink_lens.trace(m, intervention_s", "intervention_sequences="),
        ("sink_lens.sweep(m, least", "least_effect="),
        ("training.train(out, value_norm_", "value_norm_init="),
        ("edits.zero('z', lay", "layers="),
        ("edits.add('resid_post', v, pos", "positions="),
    ],
)
def test_a_notebook_completes_an_option(line, found):
    known = {
        room.__name__.rpartition(".")[2]: room for room in ROOMS if isinstance(room, ModuleType)
    }
    with provisionalcompleter():
        assert found in {
            one.text
            for one in IPCompleter(namespace=known, use_jedi=False).completions(line, len(line))
        }


def test_a_class_that_a_public_function_returns_is_public():
    names = {name for room in ROOMS for name in room.__all__}
    missing = set()
    for place, one in PUBLIC.items():
        for said in re.findall(r"\w+", str(inspect.signature(one).return_annotation)):
            made = inspect.unwrap(one).__globals__.get(said)
            if (
                inspect.isclass(made)
                and made.__module__.startswith("sink_lens")
                and said not in names
            ):
                missing.add((place, said))
    assert missing == set()
    assert len(names) > 150


def test_help_has_the_public_name_and_the_columns_of_the_result():
    assert {
        name for name, one in PUBLIC.items() if one.__name__ != name.rpartition(".")[2]
    } == set()
    with pytest.raises(InputError, match=r"^task: missing"):
        circuits.task()
    for name in ("control_effect", "over_control", "over_low", "corrected_p", "n_controls"):
        for one in (patching.patch, sweeps.sweep):
            assert f"- ``{name}``: " in (one.__doc__ or "")


@pytest.mark.parametrize(
    ("function", "option"),
    [
        (circuits.task, {"edges": 5}),
        (circuits.task, {"steps": 3}),
        (circuits.find, {"save": "c.svg"}),
        (circuits.find, {"random": 9}),
        (circuits.evaluate, {"method": "gim"}),
        (patching.attribution_patch, {"controls": 2}),
        (patching.attribution_patch, {"factor": 2.0}),
    ],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_an_option_that_the_function_does_not_read_is_no_parameter_and_is_refused(function, option):
    (name,) = option
    assert name not in inspect.signature(function).parameters
    with pytest.raises(InputError, match=name):
        function(None, None, None, **option) if function is not circuits.task else function(
            None, **option
        )
