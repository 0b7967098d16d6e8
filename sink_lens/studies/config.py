"""Configurations of the studies: frozen records; torch is not imported."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..chain.config import MOST_CONTROLS, ReadConfig, check_least_threshold
from ..configuration import check_at_least, check_at_most
from ..errors import InputError
from ..schema import SINK_THRESHOLD, QuantisedFormat


def is_run_folder(model: Any) -> bool:
    """Check whether a model argument is a run folder (has ``run.json``) and not a folder of weights."""
    if not isinstance(model, str | Path):
        return False
    return (Path(model) / "run.json").is_file() and not (Path(model) / "config.json").is_file()


@dataclass(frozen=True, slots=True, kw_only=True)
class CardConfig(ReadConfig):
    """Models of a card, a comparison or a table, and the thresholds of sinks and changes."""

    others: tuple[str, ...] = field(default=(), metadata={"positional": True, "metavar": "MODEL"})
    """A second model: what changed from the first to it. With more, or with folders of cards and traces, the answer is
    a table with a row for each."""
    threshold: float = SINK_THRESHOLD
    """A head has a sink if its sink score is above this (Gu et al., arXiv 2410.10781)."""
    trace: str | None = field(default=None, metadata={"metavar": "RUN"})
    """Folder of a trace of the same weights with interventions: the card then shows its answers about the chain and the
    sink's makers. Default: the card says that they were not asked for."""
    most_loss: float = 0.25
    """End with exit code 1 if the second model's loss is above the first model's by more than this many nats."""
    columns: tuple[str, ...] = field(
        default=(), metadata={"written": "commas", "metavar": "NAME,NAME"}
    )
    """Columns of a table, such as model,sink_rate,loss. Default: the main ones."""

    def __post_init__(self) -> None:
        ReadConfig.__post_init__(self)
        if not 0 < self.threshold < 1:
            raise InputError(
                f"threshold is {self.threshold}; need a number between 0 and 1, both excluded"
            )
        check_least_threshold(self.threshold)
        if not self.most_loss > 0:
            raise InputError(f"most_loss is {self.most_loss}; need nats above 0")
        if self.trace is not None and self.others:
            raise InputError(
                "trace=... goes with the card of one model; need it without other models"
            )

    @property
    def is_comparison(self) -> bool:
        """True if there is exactly one other model."""
        return len(self.others) == 1

    def makes_table(self) -> bool:
        """Check whether a table is made: for more than two models, or if one of them is a run folder.

        Raises:
            InputError: an option that would do nothing.
        """
        names = (self.model, *self.others)
        table = len(names) > 2 or any(map(is_run_folder, names))
        unread = {"columns": "more than two models (sink_lens.studies.cards), or folders of runs"}
        if table:
            unread = {"trace": "one model"}
        if table or not self.is_comparison:
            unread["most_loss"] = "two models that are compared"
        for name, needs in unread.items():
            if getattr(self, name) != getattr(CardConfig(), name):
                raise InputError(f"{name}=... was given; need {needs} for it")
        return table


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantiseConfig(ReadConfig):
    """Format to round to, the parts that are rounded, and the channels to try at full precision."""

    sequences: int = 32
    """Number of sequences: the first half is to choose on, the second to judge on."""
    goal: float = 0.9
    """The chosen set should recover at least this share of the loss that can be recovered."""
    controls: int = 19
    """Number of random sets of as many tokens or channels, as controls."""
    format: QuantisedFormat = field(default="int8_tensor", metadata={"metavar": "FORMAT"})
    """Format of the activations, such as int8_token: int8, int4, fp8_e4m3 or fp8_e5m2 and behind it _tensor (one scale
    per sequence), _token or _group (128 channels of a token); or mxfp4, nvfp4."""
    sites: tuple[str, ...] = field(default=(), metadata={"option": "site", "metavar": "SITE"})
    """A site to round; repeat for several. Default: the inputs of the linear layers (attn_in, z, mlp_in, neurons);
    resid_post is the stream."""
    cache: QuantisedFormat | None = field(default=None, metadata={"metavar": "FORMAT"})
    """Format of the KV cache; keys are rounded before their rotation. Default: it is not rounded."""
    weights: QuantisedFormat | None = field(default=None, metadata={"metavar": "FORMAT"})
    """Format of the weights, if they are not quantised already (_token is one scale per output channel). Default:
    they are not rounded."""
    channels: tuple[int, ...] = field(
        default=(1, 2, 4, 8, 16), metadata={"written": "commas", "metavar": "N,N"}
    )
    """Numbers of channels that are kept at each site, such as 1,2,4."""

    def __post_init__(self) -> None:
        ReadConfig.__post_init__(self)
        check_at_least(self, 0, "controls")
        check_at_most(self, MOST_CONTROLS, "controls")
        if not 0 < self.goal <= 1:
            raise InputError(f"goal is {self.goal}; need a share above 0, at most 1")
        if any(size < 1 for size in self.channels):
            raise InputError(f"channels are {list(self.channels)}; need numbers from 1 on")
        if len(set(self.sites)) < len(self.sites):
            raise InputError(f"a site is named twice: {', '.join(self.sites)}; need each once")
        if self.cache is not None and {"k", "v"} & set(self.sites):
            raise InputError(
                "k or v is named as a site, and a format of the cache was given; need one of them"
            )
