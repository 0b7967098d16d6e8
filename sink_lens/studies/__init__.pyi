"""The public names, each from the module that defines it: `__init__.py` reads this file."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import pandas as pd

from sink_lens.data.tokens import Tokens
from sink_lens.models.load import ModelLike

from ..chain.trace import Trace as Trace
from .card import card as _card
from .card_table import cards as _cards
from .config import CardConfig as CardConfig
from .config import QuantiseConfig as QuantiseConfig
from .quantise import quantise as _quantise
from .study import Study as Study
from .tokens.config import TokensConfig as TokensConfig
from .tokens.run import SinkTokens as SinkTokens
from .tokens.run import sink_tokens as _sink_tokens

def card(
    model: ModelLike,
    other: ModelLike | None = None,
    *,
    config: CardConfig | None = None,
    tokens: Tokens | str | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
    text: str | Path | None = None,
    prompts: Iterable[str] = (),
    bos: Literal["auto", "with", "without"] = "auto",
    sequences: int = 16,
    length: int = 64,
    batch_size: int | None = None,
    seed: int = 0,
    others: Iterable[str] = (),
    threshold: float = 0.3,
    trace: str | None = None,
    most_loss: float = 0.25,
    columns: Iterable[str] | str = (),
) -> Study: ...
def cards(
    models: Sequence[ModelLike],
    tokens: Tokens | str | None = None,
    *,
    columns: Sequence[str] = (),
    config: CardConfig | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
    text: str | Path | None = None,
    prompts: Iterable[str] = (),
    bos: Literal["auto", "with", "without"] = "auto",
    sequences: int = 16,
    length: int = 64,
    batch_size: int | None = None,
    seed: int = 0,
    others: Iterable[str] = (),
    threshold: float = 0.3,
    trace: str | None = None,
    most_loss: float = 0.25,
) -> pd.DataFrame: ...
def quantise(
    model: ModelLike,
    tokens: Tokens | str | None = None,
    *,
    config: QuantiseConfig | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
    text: str | Path | None = None,
    prompts: Iterable[str] = (),
    bos: Literal["auto", "with", "without"] = "auto",
    sequences: int = 32,
    length: int = 64,
    batch_size: int | None = None,
    seed: int = 0,
    goal: float = 0.9,
    controls: int = 19,
    format: Literal[
        "int8_tensor",
        "int8_token",
        "int8_group",
        "int4_tensor",
        "int4_token",
        "int4_group",
        "fp8_e4m3_tensor",
        "fp8_e4m3_token",
        "fp8_e4m3_group",
        "fp8_e5m2_tensor",
        "fp8_e5m2_token",
        "fp8_e5m2_group",
        "mxfp4",
        "nvfp4",
    ] = "int8_tensor",
    sites: Iterable[str] = (),
    cache: Literal[
        "int8_tensor",
        "int8_token",
        "int8_group",
        "int4_tensor",
        "int4_token",
        "int4_group",
        "fp8_e4m3_tensor",
        "fp8_e4m3_token",
        "fp8_e4m3_group",
        "fp8_e5m2_tensor",
        "fp8_e5m2_token",
        "fp8_e5m2_group",
        "mxfp4",
        "nvfp4",
    ]
    | None = None,
    weights: Literal[
        "int8_tensor",
        "int8_token",
        "int8_group",
        "int4_tensor",
        "int4_token",
        "int4_group",
        "fp8_e4m3_tensor",
        "fp8_e4m3_token",
        "fp8_e4m3_group",
        "fp8_e5m2_tensor",
        "fp8_e5m2_token",
        "fp8_e5m2_group",
        "mxfp4",
        "nvfp4",
    ]
    | None = None,
    channels: Iterable[int] | str = (1, 2, 4, 8, 16),
) -> Study: ...
def sink_tokens(
    model: ModelLike,
    tokens: Tokens | str | None = None,
    *,
    config: TokensConfig | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
    text: str | Path | None = None,
    prompts: Iterable[str] = (),
    bos: Literal["auto", "with", "without"] = "auto",
    sequences: int = 32,
    length: int = 256,
    batch_size: int | None = None,
    seed: int = 0,
    sink_threshold: float | None = None,
    massive_threshold: float | None = None,
    gap: float = 1.5,
    least_share: float = 2.5,
    least_norm: float = 4.0,
    energy_frac: float = 0.8,
    max_outliers: int = 8,
    dimension_factor: float = 20.0,
    coverage: float = 0.5,
    kernel: Literal["auto", "fused", "eager"] = "auto",
) -> SinkTokens: ...
