"""Where heads look and what makes them: parts against the model's own attention, and against real edits of its keys."""

import numpy as np
import pytest
import torch

from sink_lens.circuits import attention
from sink_lens.models.interfaced import use_attention

from .tiny_runs import circuit


def patterns_of(found):
    plain = found.runs.lens.plain
    with torch.no_grad(), use_attention(plain, "eager"):
        return [
            one[0].double()
            for one in plain(found.runs.clean.tokens[:1], output_attentions=True).attentions
        ]


def advantage(row, key):
    """The score of the key over the mean of the others: a softmax keeps differences."""
    row = row.log()
    return float(row[key] - torch.cat([row[:key], row[key + 1 :]]).mean())


def test_parts_sum_to_the_advantage_that_the_pattern_shows(monkeypatch):
    monkeypatch.setattr(attention, "MOST_PARTS", 10_000)
    found = circuit("llama", edges=60)
    frame, patterns = attention.explain_attention(found)
    real = patterns_of(found)
    assert len(patterns) > 3
    for (head, _, by), own in frame.groupby(["head", "side", "by"]):
        layer, number = (int(one[1:]) for one in head.split("."))
        pattern = real[layer][number]
        assert np.allclose(patterns[head], pattern, atol=1e-5)
        assert own["key"].iloc[0] == int(pattern[-1].argmax())
        assert own["advantage"].iloc[0] == pytest.approx(
            advantage(pattern[-1], int(pattern[-1].argmax())), abs=1e-4
        )
        assert own.loc[own["part"].eq("rest"), "value"].item() == pytest.approx(0, abs=1e-4), (
            head,
            by,
        )


def test_a_part_is_what_taking_its_writer_from_the_keys_does(monkeypatch):
    monkeypatch.setattr(attention, "MOST_PARTS", 10_000)
    found = circuit("llama", edges=60)
    plain = found.runs.lens.plain
    frame, _ = attention.explain_attention(found)
    deep = frame.loc[frame["side"].eq("key") & frame["by"].eq("writer") & frame["part"].eq("m0")]
    name = deep["head"].iloc[0]
    layer, number = (int(one[1:]) for one in name.split("."))
    block, kept = plain.model.layers[layer], {}
    hooks = [
        plain.model.layers[0].mlp.register_forward_hook(
            lambda _, args, output: kept.update(written=output.double())
        ),
        block.register_forward_pre_hook(lambda _, args: kept.update(stream=args[0].double())),
    ]
    before = patterns_of(found)[layer][number, -1]

    def without(module, args, output):
        scale = (
            kept["stream"].square().mean(-1, keepdim=True) + block.input_layernorm.variance_epsilon
        ).rsqrt()
        part = kept["written"] * scale * block.input_layernorm.weight.double()
        return output - (part @ module.weight.double().T).to(output.dtype)

    key = int(before.argmax())
    with torch.no_grad():
        hooks.append(block.self_attn.k_proj.register_forward_hook(without))
        after = patterns_of(found)[layer][number, -1]
    for hook in hooks:
        hook.remove()
    assert advantage(before, key) - advantage(after, key) == pytest.approx(
        deep["value"].iloc[0], abs=1e-4
    )


def test_a_norm_of_keys_leaves_the_advantage_to_the_rest_and_long_prompts_have_none(monkeypatch):
    found = circuit("qwen3", edges=60)
    frame, _ = attention.explain_attention(found)
    for _, own in frame.groupby(["head", "side", "by"]):
        assert own["value"].sum() == pytest.approx(own["advantage"].iloc[0], abs=1e-4)
    monkeypatch.setattr(attention, "LONGEST", 4)
    frame, patterns = attention.explain_attention(found)
    assert (len(frame), patterns) == (0, {})
