"""The kinds of run: from one object each come its command, its options and help, its tables, its page and its estimate.

Another package adds a kind by the entry point ``sink_lens.kinds``, which names a ``RunKind``.
"""

import functools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module, metadata

from .errors import InputError

ROOMS = ("chain", "studies", "patching", "circuits", "sweeps", "training", "identity")
"""Packages of ``sink_lens`` with kinds of run, in the order of ``--help``; each lists its own in ``kinds.py``."""
GROUP = "sink_lens.kinds"
FRAME = {
    "notebook": "sink_lens.report.notebook:notebook_html",
    "page": "sink_lens.report.html:render",
    "first_figure": "sink_lens.report.pages:first_figure",
}
"""The functions that show a result of any kind; they stand above what is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKind:
    """A kind of run. Its functions are given as texts ``module:name`` and imported when they are first needed."""

    name: str
    """The kind in ``run.json``, and its command."""
    tables: str
    """TOML file with the meaning of each column of its tables, ``package:file``; see ``sink_lens.schema``."""
    page: str
    """Its ``sink_lens.report.page.Page``."""
    heading: str = ""
    """Heading of ``sink-lens --help`` that the command stands under; empty for a kind without a command of its own."""
    help: str = ""
    """What the command does, in a sentence."""
    examples: str = ""
    """Calls of the command, one per line; ``[dim]what it does[/dim]`` may follow."""
    config: str = ""
    """Its configuration: a frozen dataclass with a docstring under each field, from which the options are made."""
    read: str = ""
    """``read(settings, where)``, which makes the configuration of what a file says and of options; ``where`` is the
    file's name, or empty. The fields by name if empty."""
    example: str = ""
    """A file to begin with, for a kind that is asked by a file: an argument of the command, which has ``--example``."""
    view: str = ""
    """Options of the command that choose what it prints, beside the configuration: a frozen dataclass like it."""
    shards: bool = False
    """True if ``run`` takes a ``shard``, too; the command then has ``--shard``."""
    run: str = ""
    """``run(config, *, out, overwrite, progress)``, which returns a ``sink_lens.records.Result``. Without it the room
    ``sink_lens.cli`` has a command that is written out."""
    check: str = ""
    """``check(config)``, which refuses what cannot be run before torch is imported."""
    passes: str = ""
    """``passes(config, sizes)``, which counts its passes of the model for ``--dry-run`` (``sink_lens.estimate``). There
    is none without it and ``cost``."""
    cost: str = ""
    """``cost(config)``, where passes do not say it: it yields what ``--dry-run`` prints, texts, page tables, costs."""
    show: str = ""
    """``show(result)``, which yields what the command prints above the page's name: texts, page tables, data frames,
    what rich prints; the headline if empty. With a view, ``show(result, view)``."""
    answer: str = ""
    """``answer(result)``, which gives what ``--json`` prints beside the folder; the result's decision if empty. With a
    view, ``answer(result, view)``."""
    failed: str = ""
    """``failed(result)``, which says whether the command ends with exit code 1."""


@functools.cache
def all_kinds() -> Mapping[str, RunKind]:
    known = {
        kind.name: kind for room in ROOMS for kind in import_module(f"sink_lens.{room}.kinds").KINDS
    }
    for point in metadata.entry_points(group=GROUP):
        try:
            if not isinstance(kind := point.load(), RunKind):
                raise InputError(
                    f"it is of type {type(kind).__name__}; need a sink_lens.kinds.RunKind"
                )
            if kind.name in known:
                raise InputError("a kind of that name is there already; give it another name")
        except Exception as error:  # noqa: BLE001  # another's package must not take the commands of this one away
            warnings.warn(
                f"the kind of run {point.name!r} ({point.value}) is left out: {error}", stacklevel=2
            )
        else:
            known[kind.name] = kind
    return known
