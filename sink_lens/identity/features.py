"""Identity features: the last token's last state after the final norm, over inputs that several models share.

Inputs are drawn and read chunk by chunk; only the states are kept. They lie in the cache under the hash of the weights,
the configuration and the inputs, so that no model reads the same inputs twice.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

from ..data.cache import (
    cache_folder,
    describe_damage,
    lock_folder,
    read_manifest,
    write_manifest,
    write_new_folder,
)
from ..data.token_ids import ordinary_ids
from ..errors import InputError, ModelError
from ..models.lens import LensModel
from ..models.load import config_hash, weights_hash
from ..models.packed import unpacked_weight
from ..models.running import prepare_pass
from ..progress import tqdm
from .config import InputKind, check_number_and_length
from .models_to_measure import generator_of_chunk

_CHUNK = 50
_TOKENS_A_FORWARD = 4096
_FORMAT = 1
"""Raised when states would differ from those in a cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about a model that decide which inputs it can share with other models."""

    weights: str
    """Hash of its parameters."""
    config: str
    """Hash of its configuration and buffers: the same weights under another activation are another model."""
    texts: Mapping[int, str] | None = field(repr=False)
    """Id -> text of each token; None if the model has no tokenizer."""
    ids: tuple[int, ...]
    """The ordinary token ids that it knows, ascending."""
    width: int
    context: int | None
    dtype: str
    embedding: tuple[float, float]
    """Mean and standard deviation of its embedding matrix."""


def read_facts(lens: LensModel) -> ModelFacts:
    # What is neither a weight nor configured, as rotary frequencies that were switched off.
    buffers = hashlib.sha256()
    for name, buffer in lens.plain.named_buffers():
        buffers.update(name.encode())
        buffers.update(buffer.detach().cpu().flatten().view(torch.uint8).numpy().data)
    matrix = unpacked_weight(lens.plain.get_input_embeddings(), dtype=lens.dtype).float()
    return ModelFacts(
        weights=weights_hash(lens),
        config=_hash_of_json([config_hash(lens), buffers.hexdigest()]),
        texts=None
        if lens.tokenizer is None
        else {number: text for text, number in lens.tokenizer.get_vocab().items()},
        ids=tuple(ordinary_ids(lens.tokenizer, lens.d_vocab)),
        width=lens.d_model,
        context=lens.n_context,
        dtype=str(lens.dtype).removeprefix("torch."),
        embedding=(float(matrix.mean()), float(matrix.std())),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Random inputs that are the same for every model; sequence i depends only on i and the seed."""

    kind: InputKind
    sequences: int
    length: int
    seed: int
    ids: tuple[int, ...] = ()
    """Tokens are drawn from these, uniformly."""
    width: int = 0
    embedding: tuple[float, float] = (0.0, 0.02)
    """Mean and standard deviation of the embeddings (ours: arXiv 2509.26404 does not say)."""

    @property
    def digest(self) -> str:
        """Hash that identifies these inputs in the cache of states."""
        told = asdict(self)
        if self.kind != "released_embeddings":  # the others' are fixed
            del told["embedding"]
        return _hash_of_json(told)

    def chunks(self) -> Iterator[Tensor]:
        """Yield the inputs in order: token ids [batch, length], or embeddings [batch, length, width]."""
        ids, (mean, deviation) = torch.tensor(self.ids), self.embedding
        shape = (_CHUNK, self.length)
        for index in range(-(-self.sequences // _CHUNK)):
            generator = generator_of_chunk(self.seed, index)
            rows = min(_CHUNK, self.sequences - index * _CHUNK)
            if self.kind == "tokens":
                yield ids[torch.randint(len(ids), shape, generator=generator)][:rows]
            else:
                drawn = torch.randn((*shape, self.width), generator=generator, dtype=torch.float32)
                yield drawn[:rows] * deviation + mean


def shared_inputs(
    known: dict[str, ModelFacts],
    *,
    kind: InputKind = "tokens",
    sequences: int,
    length: int,
    seed: int,
) -> Inputs:
    """Return random inputs that all of the models (name -> its facts) can read.

    ``kind`` is as in ``FingerprintConfig``; released embeddings have the mean and deviation of the first model's.

    Raises:
        InputError: too few sequences, a length over a model's context, models whose tokenizers give an id
            different texts, without a common token id or (for embeddings) with different widths.
    """
    check_number_and_length(sequences=sequences, length=length)
    for name, one in known.items():
        if one.context is not None and length > one.context:
            raise InputError(
                f"the length is {length} tokens; {name} takes at most {one.context}: use a shorter length"
            )
    if kind != "tokens":
        widths = {one.width for one in known.values()}
        if len(widths) > 1:
            raise InputError(
                f"random embeddings for models of widths {', '.join(map(str, sorted(widths)))}; need one width. "
                "Use random tokens"
            )
        made = Inputs(kind=kind, sequences=sequences, length=length, seed=seed, width=widths.pop())
        first = next(iter(known.values()))
        return replace(made, embedding=first.embedding) if kind == "released_embeddings" else made
    ids = sorted(set.intersection(*(set(one.ids) for one in known.values())))
    first, *others = [one.texts for one in known.values() if one.texts is not None] or [{}]
    if unlike := [number for number in ids if any(one[number] != first[number] for one in others)]:
        raise InputError(
            f"{', '.join(known)} have different tokenizers: {len(unlike):,} of their {len(ids):,} common token ids are "
            "another text in each; need one text for each, since inputs are shared. Compare models of one tokenizer"
        )
    if not ids:
        raise InputError(
            f"{', '.join(known)} have no token id in common; need some. Compare others"
        )
    return Inputs(kind=kind, sequences=sequences, length=length, seed=seed, ids=tuple(ids))


def read_features(lens: LensModel, inputs: Inputs, *, progress: bool = False) -> np.ndarray:
    """Return each input's state at the last token after the final norm [n, d_model].

    One forward pass without the unembedding.

    Raises:
        ModelError: states that are not finite, as where half precision overflows.

    Reference: arXiv 2509.26404 (code).
    """
    found = np.empty((inputs.sequences, lens.d_model), dtype=np.float32)
    size = max(1, _TOKENS_A_FORWARD // inputs.length)
    done = 0
    with (
        prepare_pass(lens),
        torch.no_grad(),
        tqdm(
            total=inputs.sequences, desc=lens.name, unit="input", disable=not progress, leave=False
        ) as bar,
    ):
        for chunk in inputs.chunks():
            for part in chunk.split(size):
                given = part.to(lens.device)
                named = (
                    {"input_ids": given}
                    if inputs.kind == "tokens"
                    else {"inputs_embeds": given.to(lens.dtype)}
                )
                states = lens.plain.base_model(**named, use_cache=False).last_hidden_state
                states = states[:, -1].float()
                if not bool(states.isfinite().all()):
                    raise ModelError(
                        f"the last states of {lens.name} in {str(lens.dtype).removeprefix('torch.')} are not finite "
                        f"(input {done}); need a type that holds them: dtype='float32' or dtype='bfloat16'"
                    )
                found[done : done + len(part)] = states.cpu().numpy()
                done += len(part)
                bar.update(len(part))
    return found


def cached_features(
    open_lens: Callable[[], LensModel], inputs: Inputs, *, of: ModelFacts, progress: bool = False
) -> np.ndarray:
    """Return what ``read_features`` gives, from the cache if it is there; else open the model and store it."""
    key = _hash_of_json([_FORMAT, of.weights, of.config, of.dtype, inputs.digest])
    folder = cache_folder() / "features" / key
    with lock_folder(folder):
        manifest = read_manifest(folder)
        if manifest is not None and describe_damage(folder, manifest) is None:
            return load_file(folder / "features.safetensors")["features"]
        lens = open_lens()
        found = read_features(lens, inputs, progress=progress)
        with write_new_folder(folder) as part:
            save_file({"features": found}, part / "features.safetensors")
            write_manifest(
                part, {"name": lens.name, "weights_sha256": of.weights, "inputs": inputs.digest}
            )
    return found


def _hash_of_json(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
