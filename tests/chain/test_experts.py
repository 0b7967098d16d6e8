"""A super expert that was written into a mixture of 64 experts is found; without it there is no sink."""

import functools

import pytest
import torch

from sink_lens.chain.config import TraceConfig
from sink_lens.chain.trace import trace
from sink_lens.edits.constructors import zero
from sink_lens.engine.forward import run_with
from sink_lens.models.load import wrap
from sink_lens.models.tiny import BOS_ID, build_random_model, tiny_tokenizer
from tests.tiny_families import config_of

N_EXPERTS, LAYER, EXPERT, NEURON, OUTLIER = 64, 2, 41, 11, 23
SHARED, TRIGGER = 5, 17


@functools.cache
def planted_expert(sink: bool = True):
    """As `planted`, with 64 experts: the router sends BOS, and nothing else, to one whose neuron writes the outlier."""
    sizes = {"num_hidden_layers": 5, "num_local_experts": N_EXPERTS, "intermediate_size": 24}
    model = build_random_model(
        config_of("mixtral", initializer_range=0.1, **sizes), seed=0, noise=0.02
    )
    slowest = model.model.layers[0].self_attn.head_dim // 2 - 1
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding.mul_(3.0)
        embedding[:, [SHARED, TRIGGER, OUTLIER]] *= 0.03
        embedding[:, SHARED] += 1.0
        embedding[BOS_ID, TRIGGER] += 2.0
        for layer, block in enumerate(model.model.layers):
            block.self_attn.o_proj.weight[[SHARED, TRIGGER, OUTLIER]] *= 0.03
            block.mlp.experts.down_proj[:, [SHARED, TRIGGER, OUTLIER]] *= 0.03
            block.self_attn.q_proj.weight.mul_(0.3)
            block.self_attn.k_proj.weight.mul_(0.3)
            d_head = block.self_attn.head_dim
            block.self_attn.q_proj.weight[slowest::d_head, SHARED] = 2.5
            block.self_attn.k_proj.weight[:, TRIGGER] = 0.0
            block.self_attn.k_proj.weight[slowest::d_head, OUTLIER] = 2.0
            block.self_attn.v_proj.weight[:, OUTLIER] = 0.0
            block.mlp.gate.weight[:, TRIGGER] = 0.0
            if layer == LAYER:
                block.mlp.gate.weight[EXPERT] = 0.0
                block.mlp.gate.weight[EXPERT, TRIGGER] = 2.0
        if sink:
            experts = model.model.layers[LAYER].mlp.experts
            for row in (NEURON, experts.down_proj.shape[2] + NEURON):  # gate and up
                experts.gate_up_proj[EXPERT, row] = 0.0
                experts.gate_up_proj[EXPERT, row, TRIGGER] = 2.0
            experts.down_proj[EXPERT, :, NEURON] = 0.0
            experts.down_proj[EXPERT, OUTLIER, NEURON] = 6.0
    return wrap(model, tokenizer=tiny_tokenizer(adds_bos=True))


def traced_into(folder, *, sink=True):
    given = {"tokens": "random", "bos": "with", "sequences": 6, "length": 24}
    config = TraceConfig(model="planted", interventions=False, random_init=False, **given)
    return trace(planted_expert(sink), config=config, out=folder, progress=False, report=False)


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    return traced_into(tmp_path_factory.mktemp("expert") / "run")


def test_the_super_expert_is_found_among_64(traced):
    experts = traced.tables["experts"]
    assert len(experts[experts["layer"] == LAYER]) == N_EXPERTS
    supers = experts[experts["is_super"]]
    assert supers[["layer", "expert", "outlier_dimension"]].to_numpy().tolist() == [
        [LAYER, EXPERT, OUTLIER]
    ]
    assert supers["routed_share"].tolist() == [1.0]
    assert supers["contribution_share"].item() == pytest.approx(1.0, abs=0.05)
    found = traced.tables["neurons"].query("is_super")
    size = planted_expert().d_expert
    assert found[["layer", "neuron", "expert"]].to_numpy().tolist() == [
        [LAYER, EXPERT * size + NEURON, EXPERT]
    ]


def test_its_ablation_removes_the_sink_and_that_of_random_experts_does_not():
    lens = planted_expert()
    tokens = torch.randint(3, 300, (6, 24), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = BOS_ID

    def late_mass(*experts):
        units = [
            unit
            for expert in experts
            for unit in range(expert * lens.d_expert, (expert + 1) * lens.d_expert)
        ]
        edits = [zero("neurons", layers=[LAYER], units=units)] if experts else []
        run = run_with(lens, tokens, edits, layers=[3, 4], loss=False, quiet=True)
        return float(run.mass.mean())

    clean = late_mass()
    assert clean > 0.5
    assert late_mass(EXPERT) < 0.2 * clean
    others = torch.randperm(N_EXPERTS, generator=torch.Generator().manual_seed(1)).tolist()
    others.remove(EXPERT)
    assert min(late_mass(*others[start : start + 3]) for start in range(0, 57, 3)) > 0.9 * clean


def test_without_the_planted_neuron_there_is_no_sink_and_no_super_expert(tmp_path):
    assert not traced_into(tmp_path / "run", sink=False).tables["experts"]["is_super"].any()
