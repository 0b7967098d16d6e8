"""Paths of a trace: they cut what they name, add up to the stream, and find the mechanism that was written by hand."""

import functools

import pytest
import torch
from mlps import BESIDE, EXPERTS

from sink_lens.chain import paths
from sink_lens.chain.config import TraceConfig
from sink_lens.chain.evidence import gather_evidence
from sink_lens.chain.links import LINKS
from sink_lens.chain.locate import GrowthStep, Location
from sink_lens.chain.measure import scout_and_measure
from sink_lens.chain.neurons import super_neurons_of_layer
from sink_lens.chain.paths import End, Path, Writings, neuron_groups, path_table
from sink_lens.chain.setting import make_setting
from sink_lens.data.tokens import from_tensor
from sink_lens.models.load import wrap
from sink_lens.models.tiny import BOS_ID, tiny_tokenizer
from sink_lens.schema import ALL_STEPS, column_names
from tests.tiny_families import MORE_FAMILIES, TINY_FAMILIES, tiny
from tests.zoo import build
from tests.zoo.with_sink import fire, mark
from tests.zoo.writing import HUGE, activation, draft, lock, neuron

CONFIG = TraceConfig(model="tiny", intervention_sequences=3, intervention_length=20, controls=5)
UNITS = [3, 5, 9]


def setting_at(family):
    """A random model of three layers with a growth step in its second, whose neurons are three of many."""
    lens = wrap(tiny(family, num_hidden_layers=3), tokenizer=tiny_tokenizer())
    tokens = torch.randint(3, 300, (3, 20), generator=torch.Generator().manual_seed(0))
    step = GrowthStep(first_layer=1, last_layer=1, ratio_before=1.0, ratio_after=2.0, dimension=4)
    location = Location(sink_positions=(0,), sink_found=True, steps=(step,), outliers={1: (4,)})
    mask = torch.zeros(lens.d_mlp, dtype=torch.bool)
    mask[UNITS] = True
    return make_setting(
        lens, from_tensor(tokens), location=location, config=CONFIG, super_neurons={1: mask}
    )


def ends_of(setting):
    (neurons,) = neuron_groups(setting) or [End(name=paths.SUPER)]
    return (
        neurons,
        End(name=paths.KEY, step=0, layers=(2,)),
        End(name=paths.MLPS, step=0, layers=(1, 2)),
    )


@pytest.mark.parametrize("family", [*TINY_FAMILIES, *MORE_FAMILIES])
def test_sources_add_up_to_the_stream_and_a_source_that_adds_nothing_changes_nothing(family):
    setting = setting_at(family)
    neurons, *targets = ends_of(setting)
    assert bool(neurons.units) == (family not in (*EXPERTS, *BESIDE))
    writings = Writings(setting=setting, units=neurons.units)
    sources = [
        *(End(name=name) for name in (paths.EMBEDDING, paths.ATTENTION, paths.MLPS)),
        neurons,
    ]
    for layer, mlp in ((1, False), (1, True), (2, False), (2, True)):
        at = {"mlp": mlp, "position": 0}
        whole = writings.input_change(End(name=paths.EVERYTHING), layer, **at)
        parts = sum(writings.input_change(source, layer, **at) for source in sources)
        assert (parts - whole).abs().max() < 1e-5 * whole.abs().max(), (family, layer, mlp)
    nothing = End(name=paths.SUPER)
    for target in [*targets, *[neurons] * bool(neurons.units)]:
        run = setting.run(
            writings.cut_edits(Path(source=nothing, target=target, position=0)), quiet=True
        )
        assert (run.mass - setting.baseline.mass).nan_to_num().abs().max() < 2e-6, (
            family,
            target.name,
        )


def test_a_path_from_neurons_to_keys_equals_path_patching_by_hand():
    setting = setting_at("llama")
    neurons, key, _ = ends_of(setting)
    writings = Writings(setting=setting, units=neurons.units)
    found = setting.run(writings.cut_edits(Path(source=neurons, target=key, position=0)))
    model, tokens, kept = setting.lens.plain, setting.tokens.tokens, {}
    before, reads = model.model.layers[1].mlp.down_proj, model.model.layers[2]
    handles = [
        before.register_forward_pre_hook(lambda module, given: kept.update(neurons=given[0])),
        reads.register_forward_pre_hook(lambda module, given: kept.update(x=given[0])),
    ]
    with torch.no_grad():
        model(tokens)
        for handle in handles:
            handle.remove()
        apart = torch.zeros_like(kept["neurons"][:, 0])
        mean = kept["neurons"][setting.averaged.mask].mean(0)
        apart[:, UNITS] = (kept["neurons"][:, 0] - mean)[:, UNITS]
        stream = kept["x"][:, 0] - apart @ before.weight.T
        new = reads.self_attn.k_proj(reads.input_layernorm(stream))

        def put(module, given, out):
            out = out.clone()
            out[:, 0] = new
            return out

        handle = reads.self_attn.k_proj.register_forward_hook(put)
        model.set_attn_implementation("eager")
        pattern = model(tokens, output_attentions=True).attentions[2]
        handle.remove()
    rows = pattern[:, :, 1:, 0].mean((1, 2))
    assert torch.allclose(found.mass_at(0, layers=[2]), rows, atol=1e-6)
    assert not torch.allclose(setting.baseline.mass_at(0, layers=[2]), rows, atol=1e-5)


def relay(*, seed=0):
    """Two growth steps: BOS fires a neuron of layer 1, what it writes fires one of layer 4, whose writing keys read."""
    made = draft(family="llama", seed=seed, n_layers=7)
    first, second = made.neurons(2)
    mark(made, [BOS_ID])
    fire(
        made,
        layer=1,
        index=first,
        reads=made.trigger,
        writes={made.outlier: made.sign * HUGE},
        token=BOS_ID,
    )
    reads = {made.outlier: made.sign}
    neuron(made, layer=4, index=second, gate=reads, up=reads, down={})
    size = 8 * HUGE / activation(made, token=BOS_ID, layer=4, index=second)
    neuron(made, layer=4, index=second, gate=reads, up=reads, down={made.second: size})
    lock(made, layers=(5, 6), reads={made.second: 1.0})
    return made.model


def table_of(model, tokens):
    """The table of a model's paths, with what the measuring pass finds there."""
    lens = wrap(model, tokenizer=tiny_tokenizer())
    own = [link.readings for link in LINKS]
    evidence = gather_evidence(
        lens, scout_and_measure(lens, tokens, config=CONFIG, own=own), config=CONFIG
    )
    supers = {
        one: super_neurons_of_layer(evidence.splits, layer=one)
        for one in evidence.panel.layers("neurons_at_sinks")
    }
    at = {"location": evidence.panel.location, "super_neurons": supers}
    return path_table(make_setting(lens, tokens, config=CONFIG, **at))


@functools.cache
def found_in(name, family="llama"):
    """(source, its step, target, its step, through) -> row, in all layers with a sink."""
    if name == "relay":
        ids = torch.stack(
            [
                torch.randperm(290, generator=torch.Generator().manual_seed(i))[:24] + 3
                for i in range(4)
            ]
        )
        ids[:, 0] = BOS_ID
        model, tokens = relay(), from_tensor(ids)
    else:
        zoo = build(name, family=family)
        model, tokens = (
            zoo.model,
            from_tensor(zoo.draw(4, length=24, generator=torch.Generator().manual_seed(0))),
        )
    table = table_of(model, tokens)
    assert table.columns.tolist() == column_names("trace", "paths")
    rows = table[table["read_step"] == ALL_STEPS].to_dict("records")
    keys = ("source", "source_step", "target", "target_step", "through")
    return {tuple(row[key] for key in keys): row for row in rows}


THROUGH = "outlier dimensions"
OF_STEP = [("super neurons", 0, "key", 0, ""), ("super neurons", 0, "key", 0, THROUGH)]
ENDS = [("super neurons", 0, "everything", -1, ""), ("key", 0, "sink", -1, "")]
MADE = {
    "embedding": [("embedding", -1, "key", -1, ""), ("key", -1, "sink", -1, "")],
    "bos_neuron": [("embedding", -1, "super neurons", 0, ""), *OF_STEP, *ENDS],
    "head_feeds": [("attention", -1, "super neurons", 0, ""), *OF_STEP, *ENDS],
    "upstream": [("MLPs", -1, "super neurons", 0, ""), *OF_STEP, *ENDS],
    "relay": [
        ("embedding", -1, "super neurons", 0, ""),
        ("super neurons", 0, "super neurons", 1, ""),
        ("super neurons", 1, "key", 1, ""),
        ("super neurons", 1, "key", 1, THROUGH),
        ("super neurons", 0, "everything", -1, ""),
        ("super neurons", 1, "everything", -1, ""),
        ("key", 1, "sink", -1, ""),
    ],
}
"""Model -> the paths that were written into it."""
FAMILIES = {
    "bos_neuron": ("llama", "qwen3", "olmo2"),
    "head_feeds": ("llama", "gemma3"),
    "upstream": ("qwen2",),
}


def test_paths_that_were_written_by_hand_are_found_and_others_are_not():
    for name, there in MADE.items():
        for family in FAMILIES.get(name, ("llama",)):
            found = found_in(name, family)
            targets = {key[2:4] for key in there}
            for key in there:
                row = found[key]
                assert row["share"] > 0.6, (name, family, row)
                assert row["ci_low"] > 0.5, (name, family, row)
                assert row["n_controls"] == 3
                assert row["control_largest"] < 0.1, (name, family, row)
            for key, row in found.items():
                if key[0] != paths.EVERYTHING and key not in there:
                    assert row["share"] < 0.1, (name, family, row)
                elif key[0] == paths.EVERYTHING and key[2:4] in targets and not key[4]:
                    assert row["share"] > 0.6, (name, family, row)


def test_a_path_that_moves_nothing_has_no_controls_and_one_that_comes_later_is_not_read():
    found = found_in("relay")
    row = found["attention", -1, "key", 1, ""]
    assert (abs(row["share"]) < 0.05, row["n_controls"], row["control"]) == (True, 0, "")
    assert found["embedding", -1, "super neurons", 0, ""]["control"] == "other neurons"
    assert found["everything", -1, "key", 1, ""]["control"] == "other positions"
    assert ("super neurons", 1, "super neurons", 0, "") not in found
