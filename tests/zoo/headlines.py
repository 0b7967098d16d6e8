"""Which headlines are true of a model of the zoo: derived from how it was made, by no rule of what says them."""

import re
from collections.abc import Iterable

import torch
from jaxtyping import Int
from torch import Tensor

from sink_lens.chain.links.words import Phrase
from sink_lens.models.tiny import BOS_ID

from .truth import ZooModel
from .writing import N_HEADS

_VARIANCE, _OUTPUT, _NEURONS, _WRITES, _KEY, _MEETS = (
    "aggregation_variance",
    "variance_preserved",
    "variance_neurons",
    "neurons_dimension",
    "dimension_key",
    "key_sink",
)


def bound_of(zoo: ZooModel) -> str | None:
    """Name what the model's sink is bound to, in the words of the table of placements; None if there is none."""
    truth = zoo.truth
    if truth.sink == "behind":
        return "own position or token" if truth.alone else "own position"
    if truth.sink_from:
        return "own position and token"
    if zoo.late_every == 1 or (truth.sink == "token" and BOS_ID not in truth.tokens):
        return "own token"
    if truth.sink == "first":
        return "positional, not BOS" if BOS_ID in truth.spares else "positional"
    if truth.sink == "token" and BOS_ID in truth.tokens:
        return "position and token" if truth.only_first else "token"
    return None


def carriers(zoo: ZooModel) -> set[str]:
    """The links whose target carries the model's sink, the outlier dimension by the key that it makes."""
    links = zoo.truth.links
    both = {
        name
        for name, truth in links.items()
        if (truth.necessary_or_sufficient, truth.carries) == ("yes", "yes")
    }
    found = both & {_VARIANCE, _OUTPUT, _NEURONS, _MEETS}
    if links[_WRITES].carries == "yes" and _KEY in both:
        found.add(_KEY)
    return found


def permitted(zoo: ZooModel) -> set[str]:
    """Keys of the phrases that are true of the model, whatever sequences it is run on."""
    truth = zoo.truth
    if truth.sink in ("none", "sink logit"):
        found = {"sink logit"} if truth.sink == "sink logit" else set()
        return {"no sink", "strongest", *found} | ({"state"} if truth.kept is not None else set())
    found = {"sink", "others", "elsewhere", "untested", "marked"} | (
        {"makers"} if truth.makers else set()
    )
    found |= {"some", "bound: some tokens"} if zoo.first_every > 1 else set()
    found |= {"sink logit"} if truth.logit_heads else set()
    if (bound := bound_of(zoo)) is not None:
        found.add(f"bound: {bound}")
    found |= {f"by {link}" for link in carriers(zoo)} or {"nothing shown"}
    variance = truth.links[_VARIANCE]
    if variance.necessary_or_sufficient == variance.carries == "no":
        found.add("no variance")
    if truth.cancels_bias:
        found.add("cancels bias")
    if truth.direction is not None:
        found.add("direction")
    return found


def untrue(
    zoo: ZooModel, tokens: Int[Tensor, "batch position"], phrases: Iterable[Phrase]
) -> list[str]:
    """The phrases of a headline that are not true of the model on these sequences, and those that it had to say."""
    true, sinks = permitted(zoo), zoo.sinks(tokens)
    position, phrases = 0, tuple(phrases)
    needed = {"sink logit"} if zoo.truth.logit_heads else set()
    if zoo.at is not None and not bool(
        sinks.all(0).any()
    ):  # the token stands somewhere else in each sequence
        true, needed = {"no sink", "strongest", "marked"}, {"no sink", "marked"}
    wrong = [f"not said: {key}" for key in sorted(needed - {phrase.key for phrase in phrases})]
    least = 0.0 if any(phrase.key == "some" for phrase in phrases) else 0.5
    for phrase in phrases:
        keys = phrase.key.split(" + ")
        said = [int(number) for number in re.findall(r"\d+", phrase.text)]
        right = set(keys) <= true
        if phrase.key == "sink" and right:
            if phrase.text.startswith("Each sequence"):
                right = bool(sinks.any(1).double().mean() > 0.5) and not bool(sinks[:, 0].all())
            else:  # rows that were cut at a token have it at one position, which is not said
                cut = phrase.text.startswith("The token")
                position = int(sinks.sum(0).argmax()) if cut else said[0]
                right = bool(sinks[:, position].double().mean() > least)
        if phrase.key == "some" and right:
            right = said[:2] == [int(sinks[:, position].sum()), len(sinks)]
        if phrase.key == "others" and right:
            places = [int(one) for one in re.findall(r"\d+", phrase.text.partition("(")[0])]
            right = bool(sinks[:, places].any(0).all())
        if phrase.key == "marked" and zoo.at is not None and right:
            count = re.search(r" in (\d+) sequence", phrase.text)
            right = count is not None and int(count[1]) == int(sinks.any(1).sum())
        if phrase.key == "sink logit" and zoo.truth.logit_heads and right:
            share = (
                len(zoo.truth.locked)
                * len(zoo.truth.logit_heads)
                / (zoo.model.config.num_hidden_layers * N_HEADS)
            )
            right = said[0] == round(100 * share)
        if phrase.key == "elsewhere" and right:
            right = said[0] == int((sinks.any(1) & ~sinks[:, position]).sum())
        if f"by {_KEY}" in keys and right:
            dims = {one for found in zoo.truth.outliers.values() for one in found}
            named = re.search(r"dimension (\d+)\b", phrase.text, flags=re.I)
            count = re.search(r"(\d+) outlier dimensions\b", phrase.text)
            right = (
                int(named[1]) in dims if named else count is not None and int(count[1]) <= len(dims)
            )
        if not right:
            wrong.append(f"{phrase.key}: {phrase.text}")
    return wrong


def drawn(zoo: ZooModel, *, sequences: int, length: int) -> Int[Tensor, "batch position"]:
    """The sequences that a model is traced on, by its seed."""
    return zoo.draw(sequences, length=length, generator=torch.Generator().manual_seed(zoo.seed))
