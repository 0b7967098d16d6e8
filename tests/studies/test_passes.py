"""Passes of the studies: they bound those that are made."""

from importlib import import_module

import pytest
import torch

from sink_lens.estimate import Sizes
from sink_lens.models.bundled import read_header
from sink_lens.studies.card import card
from sink_lens.studies.config import CardConfig, QuantiseConfig
from sink_lens.studies.passes import count_study_passes
from sink_lens.studies.quantise import quantise
from sink_lens.studies.tokens.config import TokensConfig, count_token_passes

quantisation = import_module("sink_lens.studies.quantise")

READ = {"tokens": "random", "sequences": 8, "length": 24, "device": "cpu"}


def most_passes(config, folder):
    count = count_token_passes if isinstance(config, TokensConfig) else count_study_passes
    (part,) = count(config, Sizes(header=read_header(folder))).parts
    return part.forwards


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (TokensConfig(sequences=8), 1),
        # on three inputs all, 1 set of the sinks, 2 of one channel; 3 before, half a pass for channels and of 19 draws
        (QuantiseConfig(channels=(1,)), 3 + 3 * 4 + 0.5 + 9.5),
    ],
    ids=lambda one: type(one).__name__ if not isinstance(one, int | float) else "",
)
def test_passes_by_hand(config, count, planted_folder):
    assert most_passes(config, planted_folder) == pytest.approx(count)


def test_quantise_makes_no_more_passes_than_were_estimated(planted_folder, tmp_path, monkeypatch):
    config = QuantiseConfig(**READ, controls=2, channels=(1,), format="int4_tensor")
    tokens, real = [], quantisation.run_with

    def counted(lens, batch, *given, **named):
        tokens.append(batch.tokens.numel())
        return real(lens, batch, *given, **named)

    monkeypatch.setattr(quantisation, "run_with", counted)
    quantise(planted_folder, config=config, out=tmp_path / "run", progress=False)
    made = sum(tokens) / (config.sequences * config.length)
    assert (
        3 <= made <= most_passes(config, planted_folder) - 1
    )  # the pass that finds the sinks is not counted here


@pytest.mark.parametrize("count", [1, 2])
def test_a_planted_model_is_read_in_at_most_as_many_tokens_as_were_estimated(
    count, planted_folder, tmp_path, monkeypatch
):
    embedded, real = [], torch.nn.Embedding.forward

    def counted(self, ids):
        embedded.append(ids.numel())
        return real(self, ids)

    monkeypatch.setattr(torch.nn.Embedding, "forward", counted)
    config = CardConfig(
        **READ, model=str(planted_folder), others=(str(planted_folder),) * (count - 1)
    )
    card(config.model, config=config, out=tmp_path / "run", progress=False)
    made = sum(embedded) / (config.sequences * config.length)
    assert made <= most_passes(config, planted_folder) <= 1.5 * made
