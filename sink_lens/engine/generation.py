"""Generate text under edits, for example with the sink removed.

An edit acts on every position of every pass, as in all other runs. The positions of edits are absolute, counted from
the first token of the prompt; a position that does not exist yet is edited once it exists. Every new token takes a
whole pass, since what an edit does to earlier positions may change as the sequence grows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..activations.forward import check_tokens
from ..data.described import BosCondition
from ..data.tokens import TokenBatch, Tokens, batch_of
from ..edits.constructors import Edit
from ..edits.hooks import Applied, edits_in
from ..errors import InputError
from ..models.lens import LensModel
from ..models.load import ModelLike, as_lens
from ..models.running import running
from ..records import display


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """The continuations of a prompt with and without edits."""

    prompt: str
    """The prompt as the model read it, with special tokens; empty without a tokenizer."""
    text: str
    """The continuation under the edits; empty without a tokenizer."""
    plain: str
    """The continuation without edits; empty without a tokenizer."""
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    """Token ids of ``text``, including the end token if the text ended."""
    plain_ids: tuple[int, ...]
    """Token ids of ``plain``."""

    def _repr_html_(self) -> str:
        """The continuations in a notebook."""
        said = f"Both continuations are the same for {self.same} tokens."
        return display.html(said, {"prompt": self.prompt, "edited": self.text, "plain": self.plain})

    @property
    def same(self) -> int:
        """Number of tokens that both continuations share before they differ."""
        pairs = zip(self.ids, self.plain_ids, strict=False)
        return next(
            (n for n, (one, other) in enumerate(pairs) if one != other), min(len(self.ids), len(self.plain_ids))
        )


def generate(
    lens: ModelLike,
    prompt: str | Sequence[int] | Tensor | Tokens,
    edits: Sequence[Edit] | Edit = (),
    *,
    max_new_tokens: int = 40,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    bos: BosCondition = "auto",
) -> Generated:
    """Continue a prompt under edits and, for comparison, without edits.

    With a temperature, both continuations are drawn with the same random numbers.

    Args:
        lens: the model.
        prompt: text, or its token ids as a list, a tensor or what a tokenizer returns.
        edits: the edits, applied in every pass; their positions are absolute.
        max_new_tokens: largest number of new tokens; generation stops earlier if the model ends the text.
        temperature: 0 takes the likeliest token; above 0, tokens are drawn from softmax(logits / temperature).
        generator: a CPU generator, required if the temperature is above 0.
        bos: BOS condition of a prompt given as text.

    Raises:
        InputError: prompt and new tokens exceed the context; a generator is missing; or an edit does not fit.
        SiteError: the family lacks the site of an edit, or the edit has no effect on this bridge.
    """
    lens = as_lens(lens)
    given = (edits,) if isinstance(edits, Edit) else tuple(edits)
    start = _prompt(lens, prompt, bos=bos)
    total = start.n_positions + max_new_tokens
    if max_new_tokens < 1:
        raise InputError(f"{max_new_tokens} new tokens were asked for; need at least 1")
    if lens.n_context is not None and total > lens.n_context:
        raise InputError(
            f"the prompt has {start.n_positions} tokens and {max_new_tokens} more were asked for; {lens.name} takes "
            f"{lens.n_context} in all: shorten the prompt, or ask for fewer"
        )
    if temperature < 0:
        raise InputError(f"the temperature is {temperature:g}; need 0 (the likeliest token) or more")
    if temperature > 0 and generator is None:
        raise InputError("a temperature above 0 draws tokens; pass generator=torch.Generator().manual_seed(...)")
    check_tokens(lens, start)
    given = edits_in(lens, given, n_positions=total)
    state = None if generator is None else generator.get_state()
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    found = _continue(lens, start.tokens, given, generator=generator, **options)
    plain = found
    if given:
        same = None if state is None else torch.Generator().set_state(state)
        plain = _continue(lens, start.tokens, (), generator=same, **options)
    ids = tuple(start.tokens[0].tolist())
    return Generated(
        prompt=_text(lens, ids, whole=True),
        text=_text(lens, found),
        plain=_text(lens, plain),
        prompt_ids=ids,
        ids=found,
        plain_ids=plain,
    )


def _continue(
    lens: LensModel,
    tokens: Tensor,
    edits: tuple[Edit, ...],
    *,
    max_new_tokens: int,
    temperature: float,
    generator: torch.Generator | None,
) -> tuple[int, ...]:
    """Token ids of the continuation under the edits."""
    ends = _end_ids(lens)
    record = Applied(lens=lens, edits=edits, n_sequences=1)
    new: list[int] = []
    while len(new) < max_new_tokens:
        here = torch.cat([tokens, torch.tensor([new], dtype=torch.int64)], dim=1)
        logits = _last_logits(lens, here, edits, record=record)
        if not bool(logits.isfinite().all()):
            raise InputError("the logits are not finite under these edits; need edits that keep them finite")
        if temperature > 0:
            weights = (logits / temperature).softmax(-1)
            new.append(int(torch.multinomial(weights, 1, generator=generator)))
        else:
            new.append(int(logits.argmax()))
        if new[-1] in ends:
            break
    record.warn()
    return tuple(new)


def _last_logits(
    lens: LensModel, tokens: Tensor, edits: tuple[Edit, ...], *, record: Applied
) -> Float[Tensor, " vocab"]:
    """Logits of the next token, under the edits whose positions exist already."""
    n = tokens.shape[1]
    numbers, present = [], []
    for number, one in enumerate(edits):
        kept = {
            name: None if chosen is None else tuple(index for index in chosen if index < n)
            for name, chosen in (("positions", one.positions), ("keys", one.keys))
        }
        if () not in kept.values():
            numbers.append(number)
            present.append(replace(one, **kept))
    applied = Applied(lens=lens, edits=tuple(present), n_sequences=1)
    hooks: Any = applied.fwd_hooks(
        sequences=slice(0, 1), valid=torch.ones(1, n, dtype=torch.bool), layers=range(lens.n_layers)
    )
    with running(lens), torch.no_grad():
        out = lens.bridge.run_with_hooks(tokens.to(lens.device), fwd_hooks=hooks, use_cache=False)
    record.changed |= {numbers[number] for number in applied.changed}
    record.reached |= {numbers[number] for number in applied.reached}
    return out[0, -1].float().cpu()


def _prompt(lens: LensModel, prompt: str | Sequence[int] | Tensor | Tokens, *, bos: BosCondition) -> TokenBatch:
    """The prompt as a batch of one sequence."""
    if not isinstance(prompt, str | Tensor | Mapping | TokenBatch):
        prompt = torch.tensor(list(prompt))
    if isinstance(prompt, Tensor):
        prompt = prompt[None].cpu() if prompt.ndim == 1 else prompt.cpu()
        if prompt.ndim != 2 or len(prompt) != 1 or not prompt.numel():
            raise InputError(f"the prompt has the shape {tuple(prompt.shape)}; need the ids of one sequence")
    found = batch_of(prompt, lens.tokenizer, bos=bos)
    if found.n_sequences != 1:
        raise InputError(f"the prompt is {found.n_sequences} sequences; need one")
    return found.cut(int(found.lengths[0]))


def _end_ids(lens: LensModel) -> set[int]:
    """The token ids that end a text."""
    configured = getattr(lens.plain.generation_config, "eos_token_id", None)
    own = None if lens.tokenizer is None else lens.tokenizer.eos_token_id
    several = configured if isinstance(configured, list) else [configured]
    return {one for one in [*several, own] if isinstance(one, int)}


def _text(lens: LensModel, ids: tuple[int, ...], *, whole: bool = False) -> str:
    """The text of token ids; empty without a tokenizer."""
    if lens.tokenizer is None:
        return ""
    return str(lens.tokenizer.decode(list(ids), skip_special_tokens=not whole))
