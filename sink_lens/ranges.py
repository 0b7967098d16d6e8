"""Sets of indices as people write them: ``0-3,7``."""

from collections.abc import Sequence

from .errors import InputError


def ranges(text: str, *, name: str, also: str = "") -> list[int]:
    """``0-3,7`` as [0, 1, 2, 3, 7], in the order in which it is written.

    Args:
        text: what was written.
        name: what it is called, for the message.
        also: words that would do too, for the message: ``each, all, or ``.

    Raises:
        InputError: it is something else.
    """
    found: list[int] = []
    for piece in text.split(","):
        first, dash, last = piece.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise InputError(f"{name} is {text!r}; need {also}numbers and ranges such as 0-3,7")
        found += range(int(first), int(last if dash else first) + 1)
    return found


def span(indices: Sequence[int]) -> str:
    """Indices as text: ``0-11``, or ``1-2,11`` where there are gaps."""
    parts: list[list[int]] = []
    for index in sorted(set(indices)):
        if parts and index == parts[-1][-1] + 1:
            parts[-1].append(index)
        else:
            parts.append([index])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
