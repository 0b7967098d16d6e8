"""The linter of inputs: a lost or doubled BOS, chat templates, packing that leaks, padding that is seen.

What a tokenizer does is found by using it, and what a batch does by running the model on it: the tokens of one
document, or of the padding, are replaced, and whatever else then changes has seen them. Each finding names the line to
change.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..data.bos import bos_id, text_ids, tokenizer_adds_bos
from ..errors import InputError
from ..models.lens import LensModel
from ..models.running import running
from ..text import plural, visible

_SAMPLE = "The whale's 2 eyes saw: nothing.\n\tWhy? naïve 東京 x = [1, 2]"
"""Text that tokenizers are compared on."""
_CHAT = ({"role": "user", "content": "Hello there"},)
_TURNS = (*_CHAT, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Why"})
_SEEN = 1e-4
"""A token was seen if replacing it changes logits by more than this share of their standard deviation."""
_MOST_ROWS = 8
_FIELDS = ("input_ids", "attention_mask", "position_ids", "labels")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of one check: an alarm, or that nothing is wrong."""

    check: str
    alarm: bool
    said: str
    line: str = ""
    """What to change, and where; empty where nothing is wrong."""


def _no_alarm(check: str, said: str) -> Finding:
    """A check that found nothing wrong."""
    return Finding(check=check, alarm=False, said=said)


def _broken(check: str, said: str, line: str) -> Finding:
    """A check that found a fault, with the line to change."""
    return Finding(check=check, alarm=True, said=said, line=line)


def leading_bos(ids: Sequence[int], token: int | None) -> int:
    """Count the BOS tokens that a sequence begins with."""
    count = 0
    while token is not None and count < len(ids) and ids[count] == token:
        count += 1
    return count


def check_tokenizers(base: PreTrainedTokenizerBase | None, tuned: PreTrainedTokenizerBase | None) -> list[Finding]:
    """Compare two tokenizers, and report differences that break what the model has learned."""
    if base is None or tuned is None:
        return []
    found = [_same_ids(base, tuned), _padding_token(base, tuned), _end(base, tuned)]
    if bos_id(base) == bos_id(tuned):
        found.insert(1, _plain_bos(base, tuned))
    fails = [_template_error(one) for one in (base, tuned)]
    if fails[1] and not fails[0]:
        found.append(
            _broken(
                "template_fails",
                f"the chat template ends with an error: {fails[1]}",
                "chat_template.jinja: take the first model's",
            )
        )
    elif fails[0]:
        found.append(
            _no_alarm("template", f"the first model's chat template ends with an error ({fails[0]}): not compared")
        )
    else:
        if bos_id(base) == bos_id(tuned) and any(getattr(one, "chat_template", None) for one in (base, tuned)):
            found.append(_template(base, tuned))
        if all(getattr(one, "chat_template", None) for one in (base, tuned)):
            found.append(_chat(base, tuned))
    return found


def _same_ids(base: PreTrainedTokenizerBase, tuned: PreTrainedTokenizerBase) -> Finding:
    """Check that BOS and the vocabulary are the first model's."""
    if bos_id(base) != bos_id(tuned):
        return _broken(
            "bos_token",
            f"BOS is {tuned.bos_token!r} ({bos_id(tuned)}) instead of {base.bos_token!r} ({bos_id(base)})",
            f'tokenizer_config.json: "bos_token": "{base.bos_token}"',
        )
    if text_ids(_SAMPLE, base) != text_ids(_SAMPLE, tuned):
        return _broken(
            "vocabulary",
            "the same text becomes other tokens",
            "tokenizer.json: take the file of the first model; the embeddings belong to its ids",
        )
    return _no_alarm("vocabulary", "the same text becomes the same tokens")


def _plain_bos(base: PreTrainedTokenizerBase, tuned: PreTrainedTokenizerBase) -> Finding:
    """Check that a plain text begins with BOS as often as in the first model."""
    token = bos_id(tuned)
    before, now = (leading_bos(list(one("a", verbose=False)["input_ids"]), bos_id(one)) for one in (base, tuned))
    where = "tokenizer_config.json" if "add_bos_token" in getattr(tuned, "init_kwargs", {}) else "tokenizer.json"
    if now > 1:
        return _broken(
            "bos_doubled",
            f"the tokenizer puts {now} BOS tokens in front of a text, the first model's puts {before}",
            'tokenizer.json: "post_processor": keep one BOS token in "single" and "pair"',
        )
    if now < before:
        line = (
            '"add_bos_token": true'
            if where == "tokenizer_config.json"
            else f'"post_processor": TemplateProcessing with "{tuned.bos_token}" ({token}) in front'
        )
        return _broken("bos_dropped", "the tokenizer no longer puts BOS in front of a text", f"{where}: {line}")
    if now > before:
        line = '"add_bos_token": false' if where == "tokenizer_config.json" else '"post_processor": null'
        return _broken(
            "bos_added", "the tokenizer puts BOS in front of a text, the first model's does not", f"{where}: {line}"
        )
    return _no_alarm("bos", f"both put {'BOS' if now else 'no BOS'} in front of a text")


def _padding_token(base: PreTrainedTokenizerBase, tuned: PreTrainedTokenizerBase) -> Finding:
    """Check that masking padding masks no BOS and no text."""
    pad = tuned.pad_token_id
    if pad is not None and pad == bos_id(tuned) and base.pad_token_id != bos_id(base):
        return _broken(
            "pad_is_bos",
            f"padding is the BOS token {tuned.bos_token!r}, so whatever masks padding masks BOS too",
            f'tokenizer_config.json: "pad_token": "{base.pad_token or base.eos_token}"',
        )
    if pad is not None and pad not in tuned.added_tokens_decoder and pad != base.pad_token_id:
        return _broken(
            "pad_is_text",
            f"padding is {tuned.pad_token!r}, which also stands in texts, so whatever masks padding masks it there",
            f'tokenizer_config.json: "pad_token": "{base.pad_token or base.eos_token}"',
        )
    return _no_alarm("padding_token", "padding is neither BOS nor a token of texts, or the first model's is the same")


def _end(base: PreTrainedTokenizerBase, tuned: PreTrainedTokenizerBase) -> Finding:
    """Check that no EOS is put behind a text."""
    end = _id(tuned.eos_token_id)
    before, now = (list(one("a", verbose=False)["input_ids"])[-1:] for one in (base, tuned))
    if end is not None and now == [end] and before != [_id(base.eos_token_id)]:
        return _broken(
            "eos_added",
            "the tokenizer puts EOS behind a text, the first model's does not: a prompt ends before it is continued",
            f'tokenizer.json: "post_processor": no "{tuned.eos_token}" behind the text, or "add_eos_token": false',
        )
    return _no_alarm("eos", "no EOS is put behind a text, or the first model's tokenizer puts it there too")


def _chat(base: PreTrainedTokenizerBase, tuned: PreTrainedTokenizerBase) -> Finding:
    """Check a chat of three turns: every message, the end of a turn, and the prompt for an answer."""
    before, now = (str(one.apply_chat_template(list(_TURNS), tokenize=False)) for one in (base, tuned))
    lost = [turn["content"] for turn in _TURNS if turn["content"] in before and turn["content"] not in now]
    if lost:
        return _broken(
            "template_loses_messages",
            f"the template leaves out {plural(len(lost), 'message')} of {len(_TURNS)}, such as {lost[0]!r}",
            "chat_template.jinja: write {{ message['content'] }} for every message",
        )
    ends = [_specials(one, text) for one, text in ((base, before), (tuned, now))]
    if ends[0] and not ends[1]:
        return _broken(
            "template_lost_end",
            "no special token ends a turn any more, so that answers do not stop",
            f"chat_template.jinja: write {base.eos_token} behind every answer",
        )
    asks = [
        str(one.apply_chat_template(list(_TURNS), tokenize=False, add_generation_prompt=True)) != text
        for one, text in ((base, before), (tuned, now))
    ]
    if asks[0] and not asks[1]:
        return _broken(
            "template_never_asks",
            "the template writes no generation prompt any more",
            "chat_template.jinja: end with {% if add_generation_prompt %}",
        )
    return _no_alarm("chat", "a chat shows every message, and ends its turns and asks for an answer as before")


def _template_error(tokenizer: PreTrainedTokenizerBase) -> str:
    """Find the error of a chat template that is a program; empty if it shows both chats, or there is none."""
    if not getattr(tokenizer, "chat_template", None):
        return ""
    try:
        for turns, asks in ((_CHAT, False), (_TURNS, False), (_TURNS, True)):
            tokenizer.apply_chat_template(list(turns), tokenize=False, add_generation_prompt=asks)
    except Exception as error:  # noqa: BLE001  # a template raises what it likes
        return visible(" ".join(f"{type(error).__name__}: {error}".split()), limit=200)
    return ""


def _specials(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """Special tokens of a text but for BOS."""
    special = {at for at, token in tokenizer.added_tokens_decoder.items() if token.special} - {bos_id(tokenizer)}
    return sum(token in special for token in text_ids(text, tokenizer))


def _rows_of(lens: LensModel) -> Float[Tensor, "vocab d_model"]:
    """The embedding of every token."""
    embedding: Any = lens.plain.get_input_embeddings()
    return embedding.weight.detach()


def check_rows(lens: LensModel, *, before: LensModel) -> Finding:
    """Check that every token id has an embedding row, and that no row is zero unless the first model's is zero too."""
    table, had = (_rows_of(one) for one in (lens, before))
    known = lens.tokenizer
    ids = sorted(set(known.get_vocab().values())) if known is not None else []
    beyond = [one for one in ids if one >= len(table)]
    if beyond and known is not None:
        return _broken(
            "tokens_without_rows",
            f"{plural(len(beyond), 'token')} of the tokenizer, such as {known.convert_ids_to_tokens(beyond[0])!r}, "
            f"{'lies' if len(beyond) == 1 else 'lie'} beyond the {len(table)} rows of the embedding",
            "before training: model.resize_token_embeddings(len(tokenizer))",
        )
    zero = [one for one in ids if not bool(table[one].any()) and not (one < len(had) and not bool(had[one].any()))]
    if zero and known is not None:
        return _broken(
            "rows_of_zeros",
            (
                f"the embedding of {plural(len(zero), 'token')}, such as {known.convert_ids_to_tokens(zero[0])!r}, is "
                "zero"
            ),
            "initialise new rows as their mean: model.resize_token_embeddings(n, mean_resizing=True)",
        )
    return _no_alarm("rows", "every token has an embedding")


def template_bos(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """BOS tokens in front of a chat: as the template alone gives it, and where its text is tokenised again."""
    if not getattr(tokenizer, "chat_template", None):
        return 0, 0
    text = str(tokenizer.apply_chat_template(list(_CHAT), tokenize=False))
    token = bos_id(tokenizer)
    alone = leading_bos(text_ids(text, tokenizer), token)
    return alone, leading_bos(list(tokenizer(text, verbose=False)["input_ids"]), token)


def _bos_inside(tokenizer: PreTrainedTokenizerBase) -> int:
    """BOS tokens in a chat of three turns; 0 where the tokenizer has none."""
    token = bos_id(tokenizer)
    text = str(tokenizer.apply_chat_template(list(_TURNS), tokenize=False))
    return 0 if token is None else text_ids(text, tokenizer).count(token)


def _template(base: PreTrainedTokenizerBase, tuned: PreTrainedTokenizerBase) -> Finding:
    """Check that a chat begins with one BOS, or as in the first model."""
    (before, _), (now, again) = template_bos(base), template_bos(tuned)
    if not getattr(tuned, "chat_template", None):
        return _broken("template_lost", "the chat template is gone", "chat_template.jinja: take the first model's")
    if now > max(before, 1):
        return _broken(
            "template_doubles_bos",
            f"a chat begins with {now} BOS tokens; with the first model's template, with {before}",
            "chat_template.jinja: write {{ bos_token }} once, in front of the loop over messages",
        )
    had = getattr(base, "chat_template", None)
    if had and now < before:
        return _broken(
            "template_lacks_bos",
            "a chat no longer begins with BOS",
            "chat_template.jinja: begin with {{ bos_token }}",
        )
    if now > before and (had or tokenizer_adds_bos(tuned)):
        line = "remove {{ bos_token }}, or tokenise the rendered text with add_special_tokens=False"
        again_said = f", and with {again} where its text is tokenised again" if again > now else ""
        return _broken(
            "template_adds_bos",
            (
                f"a chat begins with {plural(now, 'BOS token')}; with the first model's template, with "
                f"{before}{again_said}"
            ),
            f"chat_template.jinja: {line}",
        )
    inside, once = _bos_inside(tuned), _bos_inside(base) if had else 1
    if inside > max(once, 1):
        return _broken(
            "template_repeats_bos",
            f"a chat of three turns has {inside} BOS tokens; with the first model's template, {once}",
            "chat_template.jinja: write {{ bos_token }} once, in front of the loop over messages",
        )
    return _no_alarm("template", f"a chat begins with {plural(now, 'BOS token')} in both")


def read_batch(path: str | Path) -> dict[str, Tensor]:
    """The batch that a collator gave, from a .safetensors file: input_ids, attention_mask, position_ids, labels.

    Raises:
        InputError: the file cannot be read or has no input_ids.
    """
    try:
        found = safetensors.torch.load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} cannot be read as a batch: {error}. Need a .safetensors file of tensors") from error
    return checked_batch(found, where=str(path))


def checked_batch(batch: Mapping[str, Any], *, where: str) -> dict[str, Tensor]:
    """The tensors of a batch that a model reads.

    Raises:
        InputError: there are no input_ids of two axes, or another tensor does not fit them.
    """
    try:
        found = {name: torch.as_tensor(batch[name]) for name in _FIELDS if batch.get(name) is not None}
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{where} holds something that is not a tensor ({str(error)[:100]}); need tensors, or lists"
        ) from error
    ids = found.get("input_ids")
    if ids is None or ids.ndim != 2 or len(ids) < 1 or ids.shape[1] < 2 or ids.is_floating_point() or ids.is_complex():
        raise InputError(
            f"{where} has no input_ids of shape (sequences, positions); need a sequence or more of 2 positions or more"
        )
    found["input_ids"] = ids.long()
    for name, tensor in found.items():
        if tensor.ndim < 2 or tensor.shape[0] != ids.shape[0] or tensor.shape[-1] != ids.shape[1]:
            raise InputError(
                f"{name} of {where} has the shape {tuple(tensor.shape)}; need that of input_ids, {tuple(ids.shape)}"
            )
    return found


def check_batch(lens: LensModel, batch: Mapping[str, Any], *, where: str = "the batch") -> list[Finding]:
    """Check a batch as it goes into training (BOS, packing, padding), by running the model on it.

    Args:
        lens: the model that the batch is for, with its tokenizer.
        batch: what the collator gives: input_ids, and attention_mask, position_ids and labels where it gives them.
        where: its name in errors.

    Raises:
        InputError: the batch has no input_ids, or tensors that do not fit them.
    """
    found = checked_batch(batch, where=where)
    found = {name: tensor[:_MOST_ROWS].to(lens.device) for name, tensor in found.items()}
    tokenizer, ids = lens.tokenizer, found["input_ids"]
    n = len(_rows_of(lens))
    if bool(((ids < 0) | (ids >= n)).any()):
        return [
            _broken(
                "ids_beyond",
                f"input_ids are between {int(ids.min())} and {int(ids.max())}, and the embedding has rows 0 to {n - 1}",
                "labels = input_ids.clone() before labels are set to -100, and resize_token_embeddings for new tokens",
            )
        ]
    end = _id(None if tokenizer is None else tokenizer.eos_token_id)
    pads = _pads(found, _id(None if tokenizer is None else tokenizer.pad_token_id), end=end)
    checks = [
        _labels(found, pads, end=end),
        _check_positions(found, pads),
        _learned_places(lens, found, pads),
        _later(lens, found, pads),
        _seen_padding(lens, found, pads),
        _leaking(lens, found, pads),
    ]
    if tokenizer is not None and bos_id(tokenizer) is not None:
        checks.insert(0, _batch_bos(found, pads, tokenizer))
    return [one for one in checks if one is not None]


def _id(token: Any) -> int | None:
    """A single token id; None where there is none, or several."""
    return token if isinstance(token, int) else None


def _pads(batch: Mapping[str, Tensor], pad: int | None, *, end: int | None = None) -> Bool[Tensor, "batch position"]:
    """Padding: what a two-dimensional mask leaves out; where none leaves out anything, runs of the padding token.

    Where EOS pads, the first of a run ends a text.
    """
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    outside = torch.zeros_like(ids, dtype=torch.bool)
    if mask is not None and mask.ndim == 2:
        outside = mask == 0
    if pad is None or (pad == end and bool(outside.any())):
        return outside
    is_pad = ids == pad
    before, after = is_pad.roll(1, 1), is_pad.roll(-1, 1)
    before[:, 0], after[:, -1] = is_pad[:, 1] & (pad == end), False
    return outside | (is_pad & (before if pad == end else before | after))


def _batch_bos(batch: Mapping[str, Tensor], pads: Tensor, tokenizer: PreTrainedTokenizerBase) -> Finding:
    """Check that every sequence of the batch begins with one BOS."""
    token = bos_id(tokenizer)
    rows = [ids[~pad].tolist() for ids, pad in zip(batch["input_ids"].cpu(), pads.cpu(), strict=True)]
    counts = [leading_bos(row, token) for row in rows]
    doubled, lacking = sum(count > 1 for count in counts), sum(count == 0 for count in counts)
    if doubled:
        return _broken(
            "batch_bos_doubled",
            f"{doubled} of {plural(len(rows), 'sequence')} begin with BOS twice",
            "the text has BOS already: tokenizer(text, add_special_tokens=False)",
        )
    if lacking == len(rows) and tokenizer_adds_bos(tokenizer):
        return _broken(
            "batch_bos_dropped",
            "no sequence begins with BOS, although the tokenizer puts it in front of a text",
            "tokenizer(text, add_special_tokens=True), or put bos_token_id in front of every packed sequence",
        )
    packed = any(token in row[1:] for row in rows)
    if 0 < lacking < len(rows) and tokenizer_adds_bos(tokenizer) and not packed:
        return _broken(
            "batch_bos_mixed",
            f"{lacking} of {plural(len(rows), 'sequence')} do not begin with BOS, the others do",
            "put bos_token_id in front of every sequence, also of those that are cut from a longer text",
        )
    return _no_alarm("batch_bos", f"{len(rows) - lacking} of {plural(len(rows), 'sequence')} begin with one BOS")


def _check_positions(batch: Mapping[str, Tensor], pads: Tensor) -> Finding | None:
    """Positions count up by one from token to token, but where a document begins at 0."""
    places = batch.get("position_ids")
    if places is None:
        return None
    places = places.expand_as(batch["input_ids"])
    both = ~pads[:, 1:] & ~pads[:, :-1]
    counts, restarts = places[:, 1:] == places[:, :-1] + 1, places[:, 1:] == 0
    wrong = (both & ~counts & ~restarts).any() or (both & restarts).sum() > both.sum() / 2
    if bool(wrong):
        return _broken(
            "positions",
            "position_ids do not count up by one from token to token",
            "position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0), or give none",
        )
    return _no_alarm("positions", "positions count up by one, from 0 in every document")


def _learned_places(lens: LensModel, batch: Mapping[str, Tensor], pads: Tensor) -> Finding | None:
    """Positions that begin above 0 are other embeddings where positions are learned, and nothing where they turn."""
    places = batch.get("position_ids")
    if places is None:
        return None
    places = places.expand_as(batch["input_ids"])
    first = places.masked_fill(pads, places.max()).amin(1, keepdim=True)
    if not bool(first.any()):
        return None
    moved = dict(batch) | {"position_ids": (places - first).clamp(min=0)}
    if bool(_far(_logits(lens, batch)[~pads], _logits(lens, moved)[~pads])):
        return _broken(
            "positions_begin",
            f"positions begin at {int(first.max())} instead of 0, and this changes the model's logits",
            "position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0), or give none",
        )
    return _no_alarm("positions_begin", "positions begin above 0, which changes nothing in this model")


def _later(lens: LensModel, batch: Mapping[str, Tensor], pads: Tensor) -> Finding:
    """Check whether tokens of a sequence's first half change with those of the second."""
    ids = batch["input_ids"]
    late = (torch.arange(ids.shape[1], device=ids.device) >= ids.shape[1] // 2).expand_as(ids)
    after = _logits(lens, batch, _other_tokens(ids, where=late, n=lens.d_vocab))
    early = ~late & ~pads
    seen = _changed_tokens(_logits(lens, batch), after) & early
    if bool(seen.any()):
        return _broken(
            "later_seen",
            f"{float(seen.sum() / early.sum()):.0%} of the tokens in a sequence's first half change with later ones",
            "a 4-D attention_mask needs the triangle: mask.tril(); a float one is added, with 0 and -inf",
        )
    return _no_alarm("later_tokens", "no token attends to later ones")


def _labels(batch: Mapping[str, Tensor], pads: Tensor, *, end: int | None) -> Finding | None:
    """Check that labels leave out padding, have EOS and are not shifted."""
    labels, ids = batch.get("labels"), batch["input_ids"]
    if labels is None:
        return None
    counted = labels != -100
    if not bool(counted[:, 1:].any()):
        return _broken(
            "no_labels",
            "every label is -100: nothing is learned",
            "the collator's response template: take its ids from a rendered chat",
        )
    ends = (ids == end)[:, 1:] & ~pads[:, 1:] & counted[:, :-1] if end is not None else None
    if ends is not None and bool(ends.any()) and not bool(counted[:, 1:][ends].any()):
        return _broken(
            "eos_not_trained",
            "no EOS has a label, so the model does not learn to stop",
            "labels[attention_mask == 0] = -100 instead of labels[input_ids == pad_token_id] = -100",
        )
    if bool((counted & pads).any()):
        share = float((counted & pads).sum() / counted.sum())
        return _broken(
            "padding_trained",
            f"{share:.0%} of the labels are padding",
            "labels[attention_mask == 0] = -100",
        )
    kept = counted[:, :-1]
    own = float((labels[:, :-1] == ids[:, :-1])[kept].float().mean())
    shifted = float((labels[:, :-1] == ids[:, 1:])[kept].float().mean())
    if shifted > 0.9 > own:
        return _broken(
            "labels_shifted",
            "the labels are shifted by one already, and the model shifts them again",
            "labels = input_ids.clone()",
        )
    return _no_alarm("labels", "labels are the tokens themselves, and no padding")


def _logits(lens: LensModel, batch: Mapping[str, Tensor], ids: Tensor | None = None) -> Tensor:
    """The model's logits on the batch, or on other ids with its mask and positions."""
    given: dict[str, Any] = {name: batch[name] for name in ("attention_mask", "position_ids") if name in batch}
    mask = given.get("attention_mask")
    if mask is not None and mask.ndim > 2 and mask.is_floating_point():
        given["attention_mask"] = mask.to(lens.dtype)
    with running(lens), torch.no_grad():
        return lens.plain(input_ids=batch["input_ids"] if ids is None else ids, use_cache=False, **given).logits.float()


def _changed_tokens(before: Tensor, after: Tensor) -> Tensor:
    """At which tokens logits changed by more than rounding."""
    return (after - before).abs().amax(-1) > _SEEN * before.std().clamp(min=1e-6)


def _other_tokens(ids: Int[Tensor, "batch position"], *, where: Tensor, n: int) -> Int[Tensor, "batch position"]:
    """The token ids with others in their place where a mask says so."""
    return torch.where(where, (ids + n // 2) % n, ids)


def _seen_padding(lens: LensModel, batch: Mapping[str, Tensor], pads: Tensor) -> Finding | None:
    """Check that no real token changes with the padding."""
    if not bool(pads.any()) or bool(pads.all(1).any()):
        return None
    before = _logits(lens, batch)
    after = _logits(lens, batch, _other_tokens(batch["input_ids"], where=pads, n=lens.d_vocab))
    seen = _changed_tokens(before, after) & ~pads
    if bool(seen.any()):
        share = float(seen.sum() / (~pads).sum())
        return _broken(
            "padding_seen",
            f"{share:.0%} of the real tokens change with the padding: they attend to it",
            'model(input_ids, attention_mask=batch["attention_mask"])',
        )
    row = int(pads.sum(1).argmax())
    alone = _logits(lens, {"input_ids": batch["input_ids"][row : row + 1, ~pads[row]]})[0]
    if "position_ids" not in batch and bool(_far(before[row, ~pads[row]], alone)):
        return _broken(
            "padding_moves",
            "real tokens stand at other positions than without the padding",
            'position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0), or tokenizer.padding_side = "right"',
        )
    return _no_alarm("padding", "no real token attends to the padding")


def _far(found: Tensor, alone: Tensor) -> Tensor:
    """True if logits differ by more than rounding."""
    return ((found - alone).abs().amax() > 0.02 * alone.std()).any()


def documents(
    batch: Mapping[str, Tensor], pads: Tensor, *, bos: int | None, eos: int | None
) -> Int[Tensor, "batch position"]:
    """The number of each token's document in its row: one begins at BOS, after EOS, or where position_ids restart."""
    ids = batch["input_ids"]
    starts = torch.zeros_like(ids, dtype=torch.bool)
    if bos is not None:
        starts |= ids == bos
    if eos is not None and eos != bos:
        starts[:, 1:] |= ids[:, :-1] == eos
    places = batch.get("position_ids")
    if places is not None:
        starts[:, 1:] |= places.expand_as(ids)[:, 1:] <= places.expand_as(ids)[:, :-1]
    starts[:, 1:] &= ~(starts[:, :-1] & (ids[:, :-1] == ids[:, 1:]))  # a doubled BOS begins one document
    starts &= ~pads
    return starts.long().cumsum(1).masked_fill(pads, -1)


def _leaking(lens: LensModel, batch: Mapping[str, Tensor], pads: Tensor) -> Finding | None:
    """Check that packed documents do not see each other."""
    known = lens.tokenizer
    ends = (None, None) if known is None else (bos_id(known), _id(known.eos_token_id))
    number = documents(batch, pads, bos=ends[0], eos=ends[1])
    first = torch.where(pads, number.max() + 1, number).amin(1, keepdim=True)
    packed = (number > first).any(1)
    if not bool(packed.any()):
        return None
    ids = batch["input_ids"]
    special = torch.isin(
        ids, torch.tensor([one for one in ends if one is not None], device=ids.device, dtype=ids.dtype)
    )
    change = (number == first) & packed[:, None] & ~special
    after = _logits(lens, batch, _other_tokens(ids, where=change, n=lens.d_vocab))
    leaked = _changed_tokens(_logits(lens, batch), after) & (number > first)
    if bool(leaked.any()):
        share = float(leaked.sum() / (number > first).sum())
        return _broken(
            "packing_leaks",
            f"{share:.0%} of the tokens after the first document of a sequence change with that document",
            "data collator: give a block-diagonal 4-D attention_mask, or position_ids that restart at every document "
            'to a model with attn_implementation="flash_attention_2"',
        )
    return _no_alarm("packing", f"documents in {plural(int(packed.sum()), 'packed sequence')} do not see each other")
