"""Models to measure (by name, checkpoints, untrained ones by seed), and the random sequences that they read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..activations.forward import check_tokens
from ..data.cache import expand_home
from ..data.described import BosCondition
from ..data.tokens import TokenBatch, random_tokens
from ..errors import InputError
from ..models.lens import LensModel
from ..models.load import find_device, load
from ..records import RUN_FILE, read_run
from ..records.checkpoints import checkpoint_folders, model_identity
from .config import NOTHING, check_number_and_length
from .untrained_models import UntrainedConfig, untrained

CHUNK = 64
"""Sequences that are drawn at a time, by a generator of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelToMeasure:
    """Name and source of a model that is not yet loaded."""

    name: str
    variant: str
    """Models of one variant differ only in their seed or their training step."""
    seed: int | None = None
    """Seed of the weights, if it is known."""
    step: int | None = None
    source: str | UntrainedConfig | LensModel

    @property
    def identity(self) -> str:
        """A text by which the model is told from another of its name."""
        return model_identity(self.source) if isinstance(self.source, str) else repr(self.source)

    def open(self, *, device: str | None = None, dtype: str | None = None) -> LensModel:
        if isinstance(self.source, LensModel):
            if device is not None or dtype is not None:
                raise InputError(
                    f"device or dtype was given, and {self.name} is an open model; they go with names. Move or cast "
                    "the model before"
                )
            return self.source
        if isinstance(self.source, str):
            return load(self.source, device=device, dtype=dtype)
        if dtype not in (None, "float32"):
            raise InputError(f"dtype is {dtype!r}; untrained models are float32: leave it out")
        assert self.seed is not None
        return untrained(self.source, seed=self.seed, device=find_device(device))


def models_to_measure(
    models: Sequence[str] = (),
    *,
    configs: Sequence[UntrainedConfig] = (),
    seeds: Sequence[int] = (0,),
) -> list[ModelToMeasure]:
    """List the models to measure: by name or folder, a training run's checkpoints, untrained ones with each seed.

    Raises:
        InputError: no model is named, or one is named twice.
        RunError: a training run has no checkpoints.
    """
    found: list[ModelToMeasure] = []
    for model in models:
        folder = Path(model)
        if (folder / RUN_FILE).is_file():
            run = read_run(folder)
            found += [
                ModelToMeasure(
                    name=f"{folder.name} step {step}",
                    variant=folder.name,
                    seed=run.config.get("seed"),
                    step=step,
                    source=str(path),
                )
                for step, path in checkpoint_folders(run).items()
            ]
        else:
            found.append(ModelToMeasure(name=model, variant=model, source=model))
    for config in configs:
        found += [
            ModelToMeasure(
                name=f"{config.label} seed {s}", variant=config.label, seed=s, source=config
            )
            for s in seeds
        ]
    if not found:
        raise InputError(NOTHING)
    places = []
    for one in found:
        path = expand_home(one.source) if isinstance(one.source, str) else None
        places.append(str(path.resolve()) if path and path.exists() else one.name)
    names = [one.name for one in found]
    if twice := sorted(
        {name for name, place in zip(names, places, strict=True) if places.count(place) > 1}
    ):
        raise InputError(f"{', '.join(twice)} is there twice; need each model once")
    if same := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(
            f"two models are called {', '.join(same)}; need names that differ: give longer paths"
        )
    return found


def generator_of_chunk(seed: int, index: int) -> torch.Generator:
    draw = np.random.SeedSequence([seed, index]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(draw >> np.uint64(1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomSequences:
    """Random sequences of a model's ordinary tokens, drawn chunk by chunk to save memory."""

    sequences: int
    length: int
    seed: int
    bos: BosCondition = "without"

    def check_readable_by(self, lens: LensModel) -> None:
        check_number_and_length(sequences=self.sequences, length=self.length)
        check_tokens(lens, self.chunk(lens, 0))

    def chunk(self, lens: LensModel, index: int) -> TokenBatch:
        return random_tokens(
            lens.tokenizer,
            sequences=min(CHUNK, self.sequences - index * CHUNK),
            length=self.length,
            generator=generator_of_chunk(self.seed, index),
            bos=self.bos,
            vocab_size=lens.d_vocab,
        )

    def chunks(self, lens: LensModel) -> Iterator[TokenBatch]:
        for index in range(-(-self.sequences // CHUNK)):
            yield self.chunk(lens, index)
