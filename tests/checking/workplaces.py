"""Tiny models, their sequences and settings: builders, and the fixtures that give them."""

import functools
from dataclasses import dataclass

import pytest
import torch

from sink_lens.chain.config import TraceConfig
from sink_lens.chain.evidence import gather_evidence
from sink_lens.chain.links import LINKS
from sink_lens.chain.locate import Location
from sink_lens.chain.measure import scout_and_measure
from sink_lens.chain.neurons import super_neurons_of_layer
from sink_lens.chain.setting import Setting, make_setting
from sink_lens.data.tokens import TokenBatch, from_tensor
from sink_lens.edits.constructors import Edit, edit
from sink_lens.models.lens import LensModel
from sink_lens.models.load import wrap
from sink_lens.models.tiny import BOS_ID, PlantedTruth, planted, tiny_tokenizer
from tests.tiny_families import tiny

CONFIG = TraceConfig(model="tiny", intervention_sequences=3, intervention_length=20, controls=5)


@dataclass(frozen=True, kw_only=True)
class Workplace:
    """A model, its sequences, and what the chain found there."""

    lens: LensModel
    tokens: TokenBatch
    location: Location
    supers: dict[int, torch.Tensor]
    setting: Setting
    truth: PlantedTruth | None = None


def _tokens(lens, *, bos, sequences=4, length=24):
    tokens = torch.randint(3, 300, (sequences, length), generator=torch.Generator().manual_seed(0))
    if bos:
        tokens[:, 0] = BOS_ID
    return from_tensor(tokens, tokenizer=lens.tokenizer)


def _workplace(lens, tokens, *, truth=None):
    own = [link.readings for link in LINKS]
    evidence = gather_evidence(
        lens, scout_and_measure(lens, tokens, config=CONFIG, own=own), config=CONFIG
    )
    panel = evidence.panel
    supers = {
        layer: super_neurons_of_layer(evidence.splits, layer=layer)
        for layer in panel.layers("neurons_at_sinks")
    }
    return Workplace(
        lens=lens,
        tokens=tokens,
        location=panel.location,
        supers=supers,
        setting=make_setting(
            lens, tokens, location=panel.location, config=CONFIG, super_neurons=supers
        ),
        truth=truth,
    )


@functools.cache
def _planted_at(sink=True, seed=0):
    truth = planted(seed=seed, sink=sink)
    lens = wrap(truth.model, tokenizer=tiny_tokenizer(adds_bos=True))
    return _workplace(lens, _tokens(lens, bos=True), truth=truth)


@functools.cache
def _tiny_at(family, n_layers=2):
    lens = wrap(tiny(family, num_hidden_layers=n_layers), tokenizer=tiny_tokenizer())
    return _workplace(lens, _tokens(lens, bos=False))


@functools.cache
def _triggered(seed=0):
    """Adds to the first layer's z what W_O makes into the trigger of the planted neuron: a sink at the new position."""
    place = _planted_at(seed=seed)
    layers = place.truth.model.model.layers
    trigger = int(layers[place.truth.layer].mlp.gate_proj.weight[place.truth.neuron].argmax())
    wanted = torch.zeros(48)
    wanted[trigger] = 2.0
    added = torch.linalg.solve(layers[0].self_attn.o_proj.weight.detach(), wanted).reshape(4, 12)
    position = place.setting.target_position
    return edit("z_raw", lambda z, at: z + added, layers=[0], positions=[position], label="trigger")


@pytest.fixture(scope="session")
def config() -> TraceConfig:
    return CONFIG


@pytest.fixture(scope="session")
def planted_at():
    """The builder of the planted model's workplace: ``planted_at(sink=True, seed=0)``."""
    return _planted_at


@pytest.fixture(scope="session")
def tiny_at():
    """The builder of a random model's workplace: ``tiny_at(family, n_layers=2)``."""
    return _tiny_at


@pytest.fixture(scope="session")
def triggered() -> Edit:
    """The edit that makes a sink at the planted setting's target position."""
    return _triggered()
