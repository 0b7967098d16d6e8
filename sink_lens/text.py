"""Numbers, lists, names and sets of indices as people read and write them."""

import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from .errors import InputError

_NAMED = {"\n": "↵", "\r": "↵", "\t": "⇥"}
_MOST_INDICES = 1_000_000
_UNSHOWN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Unicode categories that are invisible, or that change how the text around them is shown."""


def safe_line(text: object, *, limit: int = 120, counted: bool = True) -> str:
    """Return any text as one line that is safe to show: cut to ``limit`` characters, invisible ones spelled out.

    Control, format (right-to-left marks, zero-width characters), private and unpaired characters are written as
    ⟨U+202E⟩. Cut text ends with its full length if ``counted``. Markup is left as it is: HTML is escaped elsewhere.
    """
    text = str(text)
    shown, length = [], 0
    for character in text:
        piece = _NAMED.get(character, character)
        if unicodedata.category(piece) in _UNSHOWN:
            piece = f"⟨U+{ord(piece):04X}⟩"
        length += len(piece)
        if length > limit:
            return f"{''.join(shown)}…" + f" ({len(text):,} characters)" * counted
        shown.append(piece)
    return "".join(shown)


def safe_for_terminal(text: str) -> str:
    """Spell out invisible characters as ⟨U+202E⟩, and keep line breaks and tabs."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        one if one in "\n\t" or unicodedata.category(one) not in _UNSHOWN else safe_line(one)
        for one in text
    )


def token_text(text: object, *, limit: int = 24, counted: bool = True) -> str:
    """Write a token as pages show it: with dots for spaces and ∅ if it is empty."""
    return safe_line(str(text).replace(" ", "·"), limit=limit, counted=counted) or "∅"


def as_text(value: Any) -> str:
    """Write a value: a number to three digits, a bool as yes or no, None and nan as 'undefined'."""
    if isinstance(value, str):
        return safe_line(value, limit=400)
    # math.isnan takes no whole number of 400 digits
    if value is None or (isinstance(value, Real) and value != value):
        return "undefined"
    if isinstance(value, bool) or type(value).__name__ == "bool_":
        return "yes" if value else "no"
    if isinstance(value, Integral) and abs(int(value)) < 10**30:
        return str(int(value))
    if not isinstance(value, Real):
        return safe_line(value, limit=400)
    try:
        value = float(value) + 0.0  # -0.0 becomes 0
    except OverflowError:  # a whole number of more than 308 digits
        return "−∞" if str(value).startswith("-") else "∞"
    magnitude = abs(value)
    if math.isinf(magnitude):
        return "∞" if value > 0 else "−∞"
    if magnitude >= 1e6 or 0 < magnitude < 1e-3:
        text = f"{value:.1e}"
    elif magnitude >= 999.5 or value.is_integer():
        text = f"{value:,.0f}"
    else:
        text = f"{value:.3g}"
    return text.replace("-", "−")


def capitalise(text: str) -> str:
    return text[:1].upper() + text[1:]


def percent(share: float) -> str:
    """Write a share, such as 0.25, in whole percent; 'undefined' for nan."""
    if math.isnan(share):
        return "undefined"
    return f"{share:.0%}".replace("-0%", "0%").replace("-", "−")


def signed_change(value: float, digits: int) -> str:
    """Write a change with its sign; one that rounds to 0 has none."""
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text.replace("-", "−")


def name_in_words(name: str) -> str:
    """Write a name from code in words: ``s2_ratio_after_w_o`` becomes "S2 ratio after W_O"."""
    text = f" {name.replace('_', ' ')} "
    for code, shown in (
        (" w o ", " W_O "),
        (" s1 ", " S1 "),
        (" s2 ", " S2 "),
        (" nats ", ", nats "),
    ):
        text = text.replace(code, shown)
    return text.strip().replace(" , ", ", ")


def site_label(name: str) -> str:
    """Return the label of a site: ``mlp_out`` becomes "MLP output"."""
    return _SITES.get(name, safe_line(name))


_SITES = {
    "resid_pre": "residual stream",
    "resid_post": "residual stream after the layer",
    "attn_in": "attention input",
    "attn_out": "attention output",
    "mlp_in": "MLP input",
    "mlp_out": "MLP output",
    "z": "head output (z)",
    "q": "queries",
    "k": "keys",
    "v": "values",
    "pattern": "attention pattern",
    "scores": "attention scores",
}


def interval_text(low: Any, high: Any, *, shown: Callable[[Any], str] = as_text) -> str:
    """Write an interval such as "[0.1, 0.3]"; "" if an end is undefined."""
    if any(end is None or (isinstance(end, Real) and math.isnan(end)) for end in (low, high)):
        return ""
    return f"[{shown(low)}, {shown(high)}]"


def loss_change_text(value: float, low: Any, high: Any) -> str:
    """Write a change of the loss with its interval, such as "costs 0.2 nats [0.1, 0.3]"."""
    verb = "costs" if value > 0 else "changes the loss by"
    return f"{verb} {as_text(value)} nats {interval_text(low, high)}".rstrip()


def short_count(count: float | int) -> str:
    """Write a large count briefly: 950, 16.4k, 2.46M, 1.2B."""
    for factor, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= 0.9995 * factor:  # what would round to a thousand of the smaller unit
            return f"{count / factor:.3g}{unit}"
    return f"{count:.0f}"


def duration_text(seconds: float) -> str:
    """Write a time in words: ``under 1 s``, ``80 s``, ``12 min`` or ``1.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 1 else "under 1 s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def about_duration_text(seconds: float) -> str:
    """Write an estimated time in words, such as ``about 12 min``."""
    return duration_text(seconds) if seconds < 1 else f"about {duration_text(seconds)}"


def size_text(n_bytes: int) -> str:
    """Write a number of bytes in decimal units, such as ``1.2 GB``."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if n_bytes >= factor:
            return f"{n_bytes / factor:,.1f} {unit}"
    return f"{n_bytes / 1e3:,.0f} kB"


def join_and(names: Iterable[object], *, most: int = 6) -> str:
    """Join names for a sentence: 'a, b and c'; after ``most`` comes the number of those left out."""
    shown = [str(name) for name in names]
    rest = len(shown) - most
    if rest > 0:
        return f"{', '.join(shown[:most])} and {rest} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else "".join(shown)


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def by_chance_text(n_intervals: int) -> str:
    """Say of more than 20 intervals of 95% how many exclude 0 by chance."""
    if n_intervals <= 20:
        return ""
    return f"{n_intervals:,} cells: about {0.05 * n_intervals:.0f} intervals exclude 0 by chance."


def head_name(layer: Any, head: Any) -> str:
    return f"L{layer:.0f}.H{head:.0f}"


def neuron_name(layer: Any, neuron: Any) -> str:
    return f"L{layer:.0f}.N{neuron:.0f}"


def label_parts(text: object) -> str:
    """Replace the names of model parts by their labels: ``2.90, head 18.8`` becomes L2.N90, L18.H8."""
    named = re.sub(r"\bhead (\d+)\.(\d+)\b", r"L\1.H\2", safe_line(text, limit=400))
    named = re.sub(r"\bmixer (\d+)", r"mixer of L\1", named)
    named = re.sub(r"\bposition embedding (\d+)", r"embedding of position \1", named)
    named = re.sub(r"\bembedding (\d+)", r"embedding of token \1", named)
    named = re.sub(r"\b(key bias|sink logit) (\d+)\.(\d+)\b", r"\1 of L\2.H\3", named)
    return re.sub(r"(?:(?<=^)|(?<=[,( ]))(\d+)\.(\d+)(?=$|[,)])", r"L\1.N\2", named)


def node_label(name: str) -> str:
    """Return the label of a circuit's node: ``a18.h8`` becomes L18.H8, and ``m5`` MLP 5."""
    if found := re.fullmatch(r"a(\d+)\.(h|kv)(\d+)", name):
        return f"L{found[1]}.{found[2].upper()}{found[3]}"
    if found := re.fullmatch(r"m(\d+)(\.n)?", name):
        return f"neurons L{found[1]}" if found[2] else f"MLP {found[1]}"
    return safe_line(name, limit=40, counted=False)


_INPUTS = {"q": "query", "k": "key", "v": "value", "g": "gate"}


def edge_label(name: str) -> str:
    """Return the label of a circuit's edge or end: ``a3.h1->a4.h1<q>`` becomes L3.H1 → query of L4.H1."""
    ends, at, span = name.partition("@")
    said = []
    for end in ends.split("->"):
        node, _, read = end.partition("<")
        read = _INPUTS.get(read.rstrip(">"), "")
        said.append(f"{read} of {node_label(node)}" if read else node_label(node))
    return " → ".join(said) + (f" at {safe_line(span, limit=40, counted=False)}" if at else "")


def layers_in_words(first: int, last: int) -> str:
    """Write layers, both included: 'layer 11' or 'layers 1 to 2'."""
    return f"layer {first}" if first == last else f"layers {first} to {last}"


def parse_ranges(text: str, *, name: str, also: str = "") -> list[int]:
    """Parse a set of indices: ``0-3,7`` gives [0, 1, 2, 3, 7], in the order written.

    The error says ``also`` what else the option accepts, such as "each, all, or ".
    """
    found: list[int] = []
    for piece in text.split(","):
        first, dash, last = piece.strip().partition("-")
        if (
            not first.isdecimal()
            or (dash and not last.isdecimal())
            or (dash and int(last) < int(first))
        ):
            raise InputError(f"{name} is {text!r}; need {also}numbers and ranges such as 0-3,7")
        asked = range(int(first), int(last if dash else first) + 1)
        if asked.stop > _MOST_INDICES:
            raise InputError(f"{name} is {text!r}; need indices below {_MOST_INDICES:,}")
        found += asked
    return found


def as_ranges(indices: Sequence[int]) -> str:
    """Write indices as ``0-11``, or ``1-2,11`` if there are gaps."""
    parts: list[list[int]] = []
    for index in sorted(set(indices)):
        if parts and index == parts[-1][-1] + 1:
            parts[-1].append(index)
        else:
            parts.append([index])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def edit_strength(row: Mapping[Any, Any]) -> str:
    """Write the strength of an edit from its factor and centre, such as " x 2 from mean"."""
    factor, centre = row.get("factor"), row.get("centre") or row.get("vector")
    times = f" x {factor:g}" if isinstance(factor, int | float) and factor == factor else ""
    return times + (f" from {safe_line(centre)}" if isinstance(centre, str) and centre else "")
