"""Generate text under edits, for example with the sink removed.

The positions of edits are counted from the first token of the prompt; a position that does not exist yet is edited once
it exists.

Where each edit is of all positions, or of positions of the prompt, and reads no other site, a new token takes the keys
and values of the positions before it from the last pass. A function may still do something else to an earlier position
once the sequence is longer. So each edit is called with the values of all positions at every new token; if its result
at an earlier one is not what it was, this token and those after it take whole passes. The first token with a cache is
compared with a whole pass of the bridge too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..activations.forward import check_tokens
from ..data.described import BosCondition
from ..data.tokens import TokenBatch, Tokens, as_batch
from ..edits.constructors import Edit, EditError
from ..edits.hooks import OPEN, Applied, Step, edits_for_model, edits_in_texts
from ..errors import InputError
from ..models.lens import LensModel
from ..models.load import ModelLike, as_lens
from ..models.running import prepare_pass, prepare_passes
from ..models.sites import SITES
from ..records import display
from ..text import join_and
from .layout import Layout
from .mixers import Kept
from .partial_pass import Pass, Visit, partial_pass

_AGREE = 1e-4
"""Share of the largest logit within which a pass with a cache agrees with a whole one."""
_SAME = 1e-5
"""Share of its largest value within which an edit does the same to a position; or two steps of the type."""
_CHANGES_TEXT = (
    "do_sample",
    "num_beams",
    "penalty_alpha",
    "repetition_penalty",
    "encoder_repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "sequence_bias",
    "suppress_tokens",
    "begin_suppress_tokens",
    "min_length",
    "min_new_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "guidance_scale",
)
_MOST_HELD = 1 << 30
"""Bytes of values that are held to call edits with them again; beyond, every token takes a whole pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """The continuations of a prompt with and without edits."""

    prompt: str
    """The prompt as the model read it, with special tokens; texts are empty without a tokenizer."""
    text: str
    """The continuation under the edits."""
    plain: str
    """The continuation without edits."""
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    """Token ids of ``text``, including the end token if the text ended."""
    plain_ids: tuple[int, ...]

    note: str = ""
    """Settings of the model's ``generation_config`` that Hugging Face's ``generate`` applies, and this does not."""
    notes: tuple[str, ...] = field(default=(), repr=False)

    def _repr_html_(self) -> str:
        said = f"Both continuations are the same for {self.same} tokens."
        texts = {"prompt": self.prompt, "edited": self.text, "plain": self.plain}
        return display.result_html(said, texts, notes=(*filter(None, [self.note]), *self.notes))

    @property
    def same(self) -> int:
        """Number of tokens that both continuations share before they differ."""
        pairs = enumerate(zip(self.ids, self.plain_ids, strict=False))
        shorter = min(len(self.ids), len(self.plain_ids))
        return next((at for at, (one, other) in pairs if one != other), shorter)


def generate(
    model: ModelLike,
    prompt: str | Sequence[int] | Tensor | Tokens,
    edits: Sequence[Edit] | Edit = (),
    *,
    max_new_tokens: int = 40,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    bos: BosCondition = "auto",
) -> Generated:
    """Continue a prompt under edits and, for comparison, without edits.

    With a temperature, both continuations are drawn with the same random numbers. The model's ``generation_config`` is
    not applied; ``note`` of the result says where Hugging Face's ``generate`` would write another text for it.

    Args:
        model: what ``load`` takes, or a ``LensModel``.
        prompt: text, or its token ids as a list, a tensor or what a tokenizer returns.
        edits: their positions count from the prompt's first token, below 0 from its last.
        max_new_tokens: generation stops earlier if the model ends the text.
        temperature: 0 takes the likeliest token; above 0, tokens are drawn from softmax(logits / temperature).
        generator: a CPU generator, required if the temperature is above 0.
        bos: BOS condition of a prompt given as text.

    Raises:
        InputError: prompt and new tokens exceed the context; a generator is missing; or an edit does not fit, or names
            a position of a prompt with padding on the left.
        SiteError: the family lacks the site of an edit, or the edit has no effect on this bridge.
    """
    lens = as_lens(model)
    start = _prompt_batch(lens, prompt, bos=bos)
    total = start.n_positions + max_new_tokens
    if max_new_tokens < 1:
        raise InputError(f"{max_new_tokens} new tokens were asked for; need at least 1")
    if lens.n_context is not None and total > lens.n_context:
        raise InputError(
            f"the prompt has {start.n_positions} tokens and {max_new_tokens} more were asked for; {lens.name} takes "
            f"{lens.n_context} in all: shorten the prompt, or ask for fewer"
        )
    if temperature < 0:
        raise InputError(
            f"the temperature is {temperature:g}; need 0 (the likeliest token) or more"
        )
    if temperature > 0 and generator is None:
        raise InputError(
            "a temperature above 0 draws tokens; pass generator=torch.Generator().manual_seed(...)"
        )
    check_tokens(lens, start)
    given = edits_for_model(lens, edits_in_texts(edits, start), n_positions=total)
    state = None if generator is None else generator.get_state()
    continuation = partial(
        _continuation_ids, lens, start.tokens, n_new=max_new_tokens, temperature=temperature
    )
    found = plain = continuation(given, generator=generator)
    if given:
        same = None if state is None else torch.Generator().set_state(state)
        plain = continuation((), generator=same)
    ids = tuple(start.tokens[0].tolist())
    return Generated(
        notes=lens.notes,
        prompt=_text_of_ids(lens, ids, whole=True),
        text=_text_of_ids(lens, found),
        plain=_text_of_ids(lens, plain),
        prompt_ids=ids,
        ids=found,
        plain_ids=plain,
        note=_note_on_config(lens),
    )


def _note_on_config(lens: LensModel) -> str:
    config = getattr(lens.plain, "generation_config", None)
    told = {} if config is None else config.to_diff_dict()
    given = {name: told.get(name) for name in _CHANGES_TEXT}
    found = [f"{name}={one}" for name, one in given.items() if one not in (None, False, [])]
    if not found:
        return ""
    return f"generation_config sets {join_and(found)}, which Hugging Face's generate applies, and this does not"


def _continuation_ids(
    lens: LensModel,
    tokens: Tensor,
    edits: tuple[Edit, ...],
    *,
    n_new: int,
    temperature: float,
    generator: torch.Generator | None,
) -> tuple[int, ...]:
    ends = _end_ids(lens)
    record = Applied(lens=lens, edits=edits, n_sequences=1)
    cache = None
    if _can_cache(lens, edits, n_prompt=tokens.shape[1], n_new=n_new):
        cache = _Cache(lens, edits)
    new: list[int] = []
    while len(new) < n_new:
        here = torch.cat([tokens, torch.tensor([new], dtype=torch.int64)], dim=1)
        logits = None
        if cache is not None:
            logits = _logits_by_cache(cache, here, n_new=len(new), record=record)
        if logits is None:
            cache, logits = None, _logits_by_whole_pass(lens, here, edits, record=record)
        if not bool(logits.isfinite().all()):
            raise InputError(
                "the logits are not finite under these edits; need edits that keep them finite"
            )
        if temperature > 0:
            shares = (logits / temperature).softmax(-1)
            new.append(int(torch.multinomial(shares, 1, generator=generator)))
        else:
            new.append(int(logits.argmax()))
        if new[-1] in ends:
            break
    record.warn_of_edits_without_effect()
    return tuple(new)


def _can_cache(lens: LensModel, edits: Sequence[Edit], *, n_prompt: int, n_new: int) -> bool:
    n_values, switch = 0, lens.rotation_switch
    turned = switch is not None and n_prompt <= switch < n_prompt + n_new  # keys are rotated anew
    if turned or lens.own_attention is not None:  # which may read whole sequences
        return False
    for one in edits:
        if one.reads is not None or one.keys is not None or max(one.positions or (0,)) >= n_prompt:
            return False
        axes = SITES[one.site].axes
        for layer in one.edited_layers(lens.n_layers):
            n_values += prod(lens.axis_sizes(axes, n_positions=n_prompt + n_new, layer=layer))
    return 2 * n_values * lens.dtype.itemsize <= _MOST_HELD  # before and after each edit


def _logits_by_cache(
    cache: "_Cache", tokens: Tensor, *, n_new: int, record: Applied
) -> Float[Tensor, " vocab"] | None:
    """Compute the logits after ``tokens`` with the cache; None if an edit changes what it does to earlier positions.

    Those of the second token are None if they differ from a whole pass's.
    """
    try:
        logits = cache.logits(tokens, record=record)
    except EditError:
        if not n_new:  # nothing was cached yet
            raise
        return None
    if n_new == 1:
        whole = _logits_by_whole_pass(cache.lens, tokens, cache.edits, record=record)
        if not torch.allclose(logits, whole, rtol=_AGREE, atol=_AGREE * float(whole.abs().max())):
            return None
    return logits


class _Cache:
    """Passes over new positions alone."""

    def __init__(self, lens: LensModel, edits: tuple[Edit, ...]) -> None:
        self.lens, self.edits = lens, edits
        self.keys: Kept = {}
        self.before: dict[int, Tensor] = {}
        self.after: dict[int, Tensor] = {}
        """All values that each step of an edit was shown, and what it made of them."""

    def logits(
        self, tokens: Int[Tensor, "1 position"], *, record: Applied
    ) -> Float[Tensor, " vocab"]:
        n = tokens.shape[1]
        room = (0, 0, 0, 1)  # for one more position
        held = {
            place: tuple(nn.functional.pad(one, room) for one in several)
            for place, several in self.keys.items()
        }
        begin = n - 1 if held else 0
        applied = Applied(lens=self.lens, edits=self.edits, n_sequences=1)
        valid, visits = torch.ones(1, n, dtype=torch.bool), dict[tuple[str, int], Visit]()
        steps = applied.steps(sequences=slice(0, 1), valid=valid, layers=range(self.lens.n_layers))
        for number, step in enumerate(steps):
            act = partial(self._apply_edit, number=number, step=step, begin=begin)
            visits.setdefault((step.site, step.layer), Visit()).edits.append((0, act))
        layout = Layout(n_sequences=1, n_positions=n, begins=(begin,))
        self.keys = {}
        asked = Pass(
            layout=layout,
            visits=visits,
            held=held,
            keep=self.keys,
            first=0,
            last=self.lens.n_layers + 1,
            logits_at=torch.tensor([n - begin - 1]),
        )
        with prepare_passes(self.lens):
            out = partial_pass(self.lens, tokens, asked)
        assert out is not None  # the pass goes to the end
        record.changed |= applied.changed
        record.reached |= applied.reached
        return out[0, -1].float().cpu()

    def _apply_edit(self, tensor: Tensor, *, number: int, step: Step, begin: int) -> Tensor | None:
        """Apply a step from position ``begin`` on; raise EditError if it changes earlier ones too."""
        axis = SITES[step.site].position_axis
        if not begin:
            new = step.act(tensor)
            self.before[number] = tensor.clone()
            self.after[number] = tensor.clone() if new is None else new
            return new
        before, after = self.before[number], self.after[number]
        if SITES[step.site].observed:  # one more key, which no earlier query sees
            unseen = torch.finfo(before.dtype).min if step.site == "scores" else 0.0
            before, after = (
                nn.functional.pad(one, (0, 1), value=unseen) for one in (before, after)
            )
        whole = torch.cat([before, tensor], dim=axis)
        new = step.act(whole)
        found = whole if new is None else new
        share = max(_SAME, 2 * torch.finfo(after.dtype).eps)
        # a position's own: sinks are larger
        scale = after.where(after > OPEN, 0.0).abs().amax(dim=-1, keepdim=True)
        earlier = found.narrow(axis, 0, begin)
        if not bool((((earlier - after).abs() <= share * scale) | (earlier == after)).all()):
            raise EditError(f"an edit of {step.site!r} changes what it does to earlier positions")
        last = found.narrow(axis, begin, tensor.shape[axis])
        self.before[number], self.after[number] = whole, torch.cat([after, last], dim=axis)
        return None if new is None else last


def _logits_by_whole_pass(
    lens: LensModel, tokens: Tensor, edits: tuple[Edit, ...], *, record: Applied
) -> Float[Tensor, " vocab"]:
    n = tokens.shape[1]
    numbers, present = [], []
    for number, one in enumerate(edits):
        chosen = {name: getattr(one, name) for name in ("positions", "keys")}
        kept = {
            name: tuple(index for index in indices if index < n)
            for name, indices in chosen.items()
            if indices is not None
        }
        if () not in kept.values():
            numbers.append(number)
            present.append(replace(one, **kept))
    applied = Applied(lens=lens, edits=tuple(present), n_sequences=1)
    valid = torch.ones(1, n, dtype=torch.bool)
    hooks: Any = applied.fwd_hooks(sequences=slice(0, 1), valid=valid, layers=range(lens.n_layers))
    with prepare_pass(lens), torch.no_grad():
        out = lens.bridge.run_with_hooks(tokens.to(lens.device), fwd_hooks=hooks, use_cache=False)
    record.changed |= {numbers[number] for number in applied.changed}
    record.reached |= {numbers[number] for number in applied.reached}
    return out[0, -1].float().cpu()


def _prompt_batch(
    lens: LensModel, prompt: str | Sequence[int] | Tensor | Tokens, *, bos: BosCondition
) -> TokenBatch:
    if not isinstance(prompt, str | Tensor | Mapping | TokenBatch):
        prompt = torch.tensor(list(prompt))
    if isinstance(prompt, Tensor):
        prompt = prompt[None].cpu() if prompt.ndim == 1 else prompt.cpu()
        if prompt.ndim != 2 or len(prompt) != 1 or not prompt.numel():
            raise InputError(
                f"the prompt has the shape {tuple(prompt.shape)}; need the ids of one sequence"
            )
    found = as_batch(prompt, lens.tokenizer, bos=bos)
    if found.n_sequences != 1:
        raise InputError(f"the prompt is {found.n_sequences} sequences; need one")
    return found.cut(int(found.lengths[0]))


def _end_ids(lens: LensModel) -> set[Any]:
    configured = getattr(lens.plain.generation_config, "eos_token_id", None)
    several = configured if isinstance(configured, list) else [configured]
    return {*several, getattr(lens.tokenizer, "eos_token_id", None)}


def _text_of_ids(lens: LensModel, ids: tuple[int, ...], *, whole: bool = False) -> str:
    if lens.tokenizer is None:
        return ""
    return str(lens.tokenizer.decode(list(ids), skip_special_tokens=not whole))
