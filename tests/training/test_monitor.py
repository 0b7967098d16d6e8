"""The monitor reads what ``watch`` reads, from the training's own forward, and changes nothing."""

import copy
import json
import math
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import forks
import numpy as np
import pandas as pd
import pytest
import torch
from tiers import first
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks import monitor_births, nothing_happens
from sink_lens import TokenBatch, load
from sink_lens.chain.chain_measures import chain_measures
from sink_lens.models.tiny import planted
from sink_lens.training import SinkMonitor, SinkMonitorCallback
from sink_lens.training.monitor_alarms import RULES, Alarms
from sink_lens.training.monitor_keys import KEYS
from tests.tiny_families import tiny

from .monitor_ranks import batches, trainer

# Dynamo looks at the gradient of what enters a graph, and torch warns about it.
dynamo = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
FAMILIES = (
    *(
        "llama",
        "mistral",
        "gemma2",
        "gemma3",
        "phi3",
        "olmo2",
        "gpt2",
        "gpt_neox",
        "gptj",
        "gpt_neo",
        "falcon",
    ),
    *("bloom", "opt", "gpt_oss", "headnorm_sink"),
)


def one_reading(model, tokens, *, watched=None, **options):
    with SinkMonitor(
        model if watched is None else watched, every=1, sequences=len(tokens), **options
    ) as monitor:
        model(input_ids=tokens, labels=tokens).loss.backward()
        return monitor.step()


def watched(model, tokens, *, threshold):
    """The same keys from ``watch``'s measures at the same weights and tokens."""
    frame = chain_measures(
        load(copy.deepcopy(model)), TokenBatch.from_tensor(tokens), threshold=threshold
    )
    frame = frame[frame["threshold"].isna() | (frame["threshold"] == threshold)]
    keys = {"sink_rate": "rate_first", "sink_mass": "mass_first", "dominance_ratio": "dominance"}
    keys["norm_ratio"] = "norm_ratio"
    frame = frame[frame["measure"].isin(list(keys))]
    return {
        f"sinks/{keys[measure]}" + ("" if pd.isna(layer) else f"/layer_{layer}"): value
        for measure, layer, value in zip(
            frame["measure"], frame["layer"], frame["value"], strict=True
        )
    }


def hooks_of(model):
    return sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.modules())


def train(model, call, *, monitored):
    """Losses, readings and the optimizer of a short training."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, readings = [], []
    with SinkMonitor(call, every=2) if monitored else nullcontext() as monitor:
        for tokens in batches():
            loss = call(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if monitor and (reading := monitor.step()):
                readings.append(reading)
    return losses, readings, optimizer


@pytest.mark.parametrize("family", FAMILIES)
def test_reading_equals_watch_at_the_same_weights_and_tokens(family):
    model, tokens = tiny(family), batches(1)[0]
    reading, expected = (  # 40 tokens: twice what uniform attention gives is .214
        one_reading(model, tokens, threshold=0.22),
        watched(model, tokens, threshold=0.22),
    )
    assert len(expected) == 4 + 2 * 3 + 2 * 4
    for key, value in expected.items():
        if math.isnan(value):  # a window too short to tell a sink: what is not defined is left out
            assert key not in reading
        else:
            assert reading[key] == pytest.approx(value, rel=1e-4, abs=1e-7), key


@dynamo
@pytest.mark.parametrize(
    "how",
    ["eager", "checkpointing", "reentrant", "compiled", "compiled outside", "in place", "layers"],
)
def test_reading_is_the_same_however_the_model_runs(how):
    torch._dynamo.reset()
    model, tokens = tiny("llama").train(), batches(1)[0]
    expected, call, watched = one_reading(tiny("llama").train(), tokens), model, None
    if how == "eager":
        model.set_attn_implementation("eager")
    elif how in ("checkpointing", "reentrant"):
        # Under its new name, which the oldest transformers that is taken does not have.
        enable = getattr(
            model, "activation_checkpointing_enable", model.gradient_checkpointing_enable
        )
        enable({"use_reentrant": how == "reentrant"})
    elif how in (
        "compiled",
        "compiled outside",
    ):  # outside: the monitor has the bare model, and another is called
        call = torch.compile(model, backend="eager")
        watched = model if how == "compiled outside" else call
    elif how == "in place":
        model.compile(backend="eager")
    elif how == "layers":
        for layer in model.model.layers:
            layer.compile(backend="eager")
    assert one_reading(call, tokens, watched=watched) == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("how", first(["ddp", "fsdp1", "fsdp2"]))
def test_two_processes_read_what_one_does(how, tmp_path):
    out = tmp_path / "readings.x"
    code, said = forks.run(
        Path(__file__).with_name("monitor_ranks.py"), out, how, said=tmp_path / "said", ranks=2
    )
    assert code == 0, said
    first, second = (json.loads(out.with_suffix(f".{rank}").read_text()) for rank in (0, 1))
    assert first == second
    model, tokens = tiny("llama").train(), batches(1, seed=5)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with SinkMonitor(model, every=1) as monitor:
        for reading in first:
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert reading == pytest.approx(monitor.step(), rel=1e-4, abs=1e-6)


def test_other_keys_against_loops_over_hidden_states_and_attentions():
    model, tokens = tiny("llama"), batches(1, length=70)[0]
    model.set_attn_implementation("eager")
    reading = one_reading(model, tokens, threshold=0.1)
    with torch.no_grad():
        out = model.model(input_ids=tokens, output_attentions=True, output_hidden_states=True)
    rows = np.linspace(0, 69, 64).round().astype(int)
    stream = []  # the last of Hugging Face's states has gone through the last norm: taken by a hook instead
    handle = model.model.layers[-1].register_forward_hook(
        lambda module, args, output: stream.append(output)
    )
    with torch.no_grad():
        model(input_ids=tokens)
    handle.remove()
    states = [*out.hidden_states[1:-1], stream[0]]
    for layer, (pattern, state) in enumerate(zip(out.attentions, states, strict=True)):
        p = pattern.double().numpy()[:, :, rows]
        terms = np.where(p > 0, -p * np.log(np.where(p > 0, p, 1)), 0).sum(-1)
        assert reading[f"sinks/entropy/layer_{layer}"] == pytest.approx(terms.mean(), rel=1e-4)
        h = state.double().numpy()
        assert reading[f"sinks/max_activation/layer_{layer}"] == pytest.approx(
            np.abs(h).max(), rel=1e-5
        )
        centred = h - h.mean(-1, keepdims=True)
        kurtosis = (centred**4).mean(-1) / (centred**2).mean(-1) ** 2 - 3
        assert reading[f"sinks/kurtosis/layer_{layer}"] == pytest.approx(kurtosis.mean(), rel=1e-4)


def test_largest_logit_is_the_scaled_product_of_rotated_query_and_key():
    model, tokens = (
        tiny("gpt2"),
        batches(1)[0],
    )  # no rotation: the product of the projections is the logit
    taken = {}
    handles = [
        block.attn.c_attn.register_forward_hook(
            lambda m, a, out, layer=layer: taken.setdefault(layer, out.detach())
        )
        for layer, block in enumerate(model.transformer.h)
    ]
    reading = one_reading(model, tokens)
    for handle in handles:
        handle.remove()
    for layer, out in taken.items():
        q, k, _ = (
            part.unflatten(-1, (4, 12)).transpose(1, 2).double() for part in out.split(48, dim=-1)
        )
        causal = torch.ones(40, 40).tril().bool()
        largest = (q @ k.mT / math.sqrt(12))[..., causal].max()
        assert reading[f"sinks/max_logit/layer_{layer}"] == pytest.approx(float(largest), rel=1e-4)


def test_planted_sink_is_found_where_it_stands_and_not_without_it():
    for position in (0, 5):
        tokens = batches(1)[0]
        tokens[:, position] = 1  # BOS, the sink of the planted model
        model = planted(sink=True).model
        reading = one_reading(model, tokens)
        assert reading["sinks/strongest_position"] == position
        assert reading["sinks/rate_strongest"] > 0.2
        assert (reading["sinks/rate_first"] > 0.2) == (position == 0)
        without = one_reading(planted(sink=False).model, tokens)
        assert without["sinks/rate_strongest"] < 0.05


def test_planted_residual_sink_has_coverage_and_its_dimension():
    model, tokens = tiny("llama"), batches(1)[0]
    assert one_reading(model, tokens)["sinks/coverage"] == 0
    with torch.no_grad():
        model.model.embed_tokens.weight[::2, 7] = 500.0  # on every other token id
    reading = one_reading(model, tokens)
    share = float((tokens[:, 8:] % 2 == 0).float().mean())
    assert reading["sinks/coverage/layer_0"] == pytest.approx(share)
    assert reading["sinks/coverage_dimension"] == 7


# --- it changes nothing


@dynamo
@pytest.mark.parametrize("how", first(["plain", "checkpointing", "autocast", "compiled"], stay=3))
def test_training_is_bit_identical_with_and_without(how):
    found = []
    for monitored in (True, False):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        model = tiny("gpt2", resid_pdrop=0.1, attn_pdrop=0.1, embd_pdrop=0.1).train()
        if how == "checkpointing":
            enable = getattr(
                model, "activation_checkpointing_enable", model.gradient_checkpointing_enable
            )
            enable({"use_reentrant": False})
        call = torch.compile(model, backend="eager") if how == "compiled" else model
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
            losses, readings, optimizer = train(model, call, monitored=monitored)
        assert len(readings) == 3 * monitored
        assert all(module.training for module in model.modules())
        moments = [value for state in optimizer.state.values() for value in state.values()]
        graphs = dict(torch._dynamo.utils.counters["stats"])
        found.append((losses, [*model.parameters(), *moments, torch.get_rng_state()], graphs))
    (losses, tensors, graphs), (plain_losses, plain_tensors, plain_graphs) = found
    assert losses == plain_losses
    assert all(torch.equal(a, b) for a, b in zip(tensors, plain_tensors, strict=True))
    assert graphs == plain_graphs


def test_hooks_are_gone_between_readings_at_the_end_and_after_an_error():
    model, tokens = tiny("llama").train(), batches(1, sequences=16)[0]
    before, implementation = hooks_of(model), model.config._attn_implementation
    with SinkMonitor(model, every=2, sequences=16) as monitor:
        assert hooks_of(model) > before
        model(input_ids=tokens)
        assert hooks_of(model) == before
        monitor.step()
        assert hooks_of(model) == before
    with pytest.raises(RuntimeError, match="of the loop"), SinkMonitor(model, every=1):
        raise RuntimeError("of the loop")
    assert hooks_of(model) == before
    with SinkMonitor(model, every=1), pytest.raises(IndexError):
        model(input_ids=tokens + 1000)
    assert hooks_of(model) == before
    assert model.config._attn_implementation == implementation


def foreign():
    return {
        name: one
        for name, one in ALL_ATTENTION_FUNCTIONS.items()
        if not name.startswith("sink_lens")
    }


def parts_of(model):
    return [(type(module), id(vars(module).get("config"))) for module in model.modules()]


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "headnorm_sink", "gptj", "gpt_neo", "falcon", "bloom"]
)
def test_neither_the_model_nor_transformers_is_changed_while_it_is_read(name):
    """Another model, on another thread, must find what it would find without a monitor."""
    model, tokens = tiny(name), batches(1)[0]
    functions, seen, parts = foreign(), [], parts_of(model)
    implementation = model.config._attn_implementation

    def look(*given):
        assert foreign() == functions
        seen.append(model.config._attn_implementation)

    handles = [
        one.register_forward_hook(look)
        for one in model.modules()
        if not list(one.children()) and one is not model
    ]
    one_reading(model, tokens)
    for handle in handles:
        handle.remove()
    assert set(seen) == {implementation}
    assert parts_of(model) == parts


@pytest.mark.parametrize("n", [5, 8, 9, 16])
def test_uniform_attention_to_a_short_text_is_no_sink(n):
    model = tiny("llama", initializer_range=0.02)
    reading = one_reading(model, torch.randint(3, 300, (4, n)))
    assert reading["sinks/mass_first"] == pytest.approx(
        np.mean([1 / seen for seen in range(2, n + 1)]), rel=0.02
    )
    assert "sinks/rate_first" not in reading  # at 9 tokens uniform attention scores .314


@pytest.mark.parametrize("length", [17, 24, 42])
def test_rate_of_the_first_token_is_above_twice_uniform_attention(length):
    model, tokens = tiny("llama"), batches(1, length=length)[0]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found = torch.stack(model(input_ids=tokens, output_attentions=True).attentions)[..., 0]
    uniform = sum(1 / n for n in range(1, length + 1)) / length
    for threshold in (0.1, 0.25):
        over = (found.mean(-1) > max(threshold, 2 * uniform)).float().mean()
        reading = one_reading(model, tokens, threshold=threshold)
        assert reading["sinks/rate_first"] == pytest.approx(float(over))


@pytest.mark.parametrize("family", first(FAMILIES, stay=2))
def test_rows_that_begin_with_padding_are_read_from_their_own_first_token(family):
    model, generator, readings = tiny(family), torch.Generator().manual_seed(0), []
    texts = [torch.randint(3, 300, (n,), generator=generator) for n in (20, 24, 14, 26)]
    for before in (0, 1):
        tokens, mask = torch.full((4, 26), 7), torch.zeros(4, 26, dtype=torch.long)
        for row, text in enumerate(texts):
            start = before * (26 - len(text))
            tokens[row, start : start + len(text)] = text
            mask[row, start : start + len(text)] = 1
        given = {"input_ids": tokens, "attention_mask": mask}
        if family not in ("bloom", "opt"):  # these number real tokens themselves
            given["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        with SinkMonitor(model, every=1, threshold=0.1) as monitor:
            model(**given)
            readings.append(monitor.step())
    assert "sinks/rate_first" in readings[0] or family in ("mistral", "phi3")
    assert readings[1] == pytest.approx(readings[0], rel=1e-4, abs=1e-5)


def test_mass_of_rows_that_begin_with_padding_is_the_mean_of_the_single_texts():
    model, texts = tiny("llama"), [batches(1, length=n)[0][:1] for n in (4, 24, 14, 26)]
    alone = [one_reading(model, text)["sinks/mass_first"] for text in texts]
    tokens = torch.cat(
        [torch.nn.functional.pad(one, (26 - one.shape[1], 0), value=7) for one in texts]
    )
    with SinkMonitor(model, every=1) as monitor:
        model(
            input_ids=tokens,
            attention_mask=(torch.arange(26) >= torch.tensor([[22], [2], [12], [0]])).long(),
        )
        assert monitor.step()["sinks/mass_first"] == pytest.approx(np.mean(alone), rel=1e-4)


def test_padding_behind_the_tokens_changes_no_number():
    model, tokens = tiny("llama"), batches(1)[0]
    padded, mask = torch.cat([tokens, torch.full((4, 6), 7)], dim=1), torch.ones(4, 46)
    mask[:, 40:] = 0
    with SinkMonitor(model, every=1) as monitor:
        model(input_ids=padded, attention_mask=mask)
        expected = one_reading(model, tokens)
        del expected["sinks/loss"]
        assert monitor.step() == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
def test_fixed_tokens_are_read_in_place_of_the_batch(compiled):
    torch._dynamo.reset()
    model, fixed = tiny("gpt2", resid_pdrop=0.5).train(), batches(1, seed=9)[0]
    call = torch.compile(model, backend="eager") if compiled else model
    with SinkMonitor(call, every=1, tokens=fixed) as monitor:
        call(input_ids=batches(1)[0])
        reading = monitor.step()
    expected = one_reading(tiny("gpt2", resid_pdrop=0.5).eval(), fixed)
    del expected["sinks/loss"]
    assert reading == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_an_evaluation_and_a_generation_between_two_steps_are_not_read():
    model, tokens, other = tiny("llama"), *batches(2)
    with SinkMonitor(model, every=1) as monitor:
        with torch.no_grad():
            model(input_ids=other, labels=other)
            model.generate(other[:, :5], max_new_tokens=3, pad_token_id=0)
        model(input_ids=tokens, labels=tokens).loss.backward()
        assert monitor.step() == one_reading(tiny("llama"), tokens)


def test_every_key_is_documented_and_under_one_prefix():
    reading = one_reading(tiny("llama"), batches(1)[0])
    names = {key.removeprefix("sinks/").partition("/layer_")[0] for key in reading}
    assert all(key.startswith("sinks/") for key in reading)
    assert names == set(KEYS)


# --- the Trainer


class Tracker(INTEGRATION_TO_CALLBACK["tensorboard"]):
    """Where the Trainer's own trackers are: keeps what it is given."""

    def __init__(self):
        self.seen = []

    def __getattribute__(self, name):
        if name.startswith("on_") and name != "on_log":
            return lambda *args, **given: None
        return super().__getattribute__(name)

    def on_log(self, args, state, control, logs=None, **given):
        self.seen.append((state.global_step, logs))


@pytest.mark.parametrize(
    "options", [{}, {"gradient_accumulation_steps": 2, "bf16": True}, {"torch_compile": True}]
)
def test_trainer_logs_the_readings_and_trains_the_same(options, tmp_path):
    if "torch_compile" in options:
        torch._dynamo.reset()
        options = options | {"torch_compile_backend": "eager"}
    tracker, callback = Tracker(), SinkMonitorCallback(every=2)
    options = options | {"logging_steps": 3, "save_strategy": "no"}
    watched = trainer(tmp_path / "a", tracker, callback, **options)
    callback._trainer = watched
    watched.train()
    plain = trainer(tmp_path / "b", **options)
    plain.train()
    history = [entry for entry in watched.state.log_history if "sinks/rate_first" in entry]
    assert [entry["step"] for entry in history] == [1, 3, 5, 6]  # the last step is read
    assert [entry["sinks/step"] for entry in history] == [0, 2, 4, 5]
    assert all(0 <= entry["sinks/mass_first/layer_1"] <= 1 for entry in history)
    seen = [(step, logs["sinks/step"]) for step, logs in tracker.seen if "sinks/rate_first" in logs]
    assert seen == [(1, 0), (3, 2), (5, 4), (6, 5)]
    json.dumps(watched.state.log_history)
    losses = [
        [entry["loss"] for entry in one.state.log_history if "loss" in entry]
        for one in (watched, plain)
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2
    both = zip(watched.model.parameters(), plain.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in both)
    assert hooks_of(watched.model) == hooks_of(plain.model)


# --- alarms


def alarms_of(key, values, *, every=50, positions=(), sequences=16):
    alarms, found = Alarms(threshold=0.4), []
    for i, value in enumerate(values):
        at = positions[i] if positions else 0
        reading = {
            (key, None): value,
            ("strongest_position", None): at,
            ("strongest_sequences", None): sequences,
        }
        found += alarms.add_reading(reading, step=every * i)
    return found


def test_a_birth_is_said_once_and_again_after_it_has_gone():
    (alarm,) = alarms_of(
        "rate_strongest", [0, 0.01, 0, 0.125, 0.2, 0.2], positions=[3, 0, 0, 2, 2, 2]
    )
    assert (alarm.rule, alarm.step, alarm.position) == ("sink_born", 200, 2)
    assert all(one in alarm.sentence for one in ("step 200", "position 2", "0.200", "above 0.4"))
    # 2 (0.125 - 0.02) are summed up; each 0 takes 0.02 away, so eleven of them end it.
    assert [
        one.step for one in alarms_of("rate_strongest", [0, 0, 0.125, 0.125, *[0] * 11, 0.1, 0.1])
    ] == [150, 800]


@pytest.mark.parametrize(
    "options",
    [
        {"positions": [0, 0, 1, 0, 1, 0]},  # not of one position
        {"sequences": 15},
        {"values": [0, 0, 0.5, 0, 0.5, 0]},  # not in two readings in a row
        {"values": [0.5, 0.5, 0.6, 0.6, 0.6, 0.6]},  # it was there before
    ],
)
def test_what_does_not_last_at_one_position_is_no_birth(options):
    options = {"values": [0, 0, 0.5, 0.5, 0.5, 0.5], "sequences": 16} | options
    assert alarms_of("rate_strongest", **options) == []


@pytest.mark.parametrize("shortest", first([8, 16]))
def test_weights_that_never_change_raise_no_alarm_at_any_length(shortest):
    draw = torch.Generator().manual_seed(0)
    with SinkMonitor(tiny("llama"), every=1) as monitor:
        for _ in range(30):
            length = int(torch.randint(shortest, 5 * shortest + 1, (), generator=draw))
            monitor._outer(input_ids=torch.randint(3, 300, (8, length), generator=draw))
            monitor.step()
    assert [one.rule for one in monitor.alarms] == []


def test_a_birth_is_gathered_over_steps_and_warns_and_is_in_the_reading():
    without, model = planted(sink=False).model, planted(sink=True).model
    tokens = batches(1)[0]
    tokens[:, 5] = 1  # BOS, the sink of the planted model
    later, sequences, alarms = (
        {name: one.clone() for name, one in model.state_dict().items()},
        [],
        [],
    )
    model.load_state_dict(without.state_dict())
    with warnings.catch_warnings(record=True) as told, SinkMonitor(model, every=5) as monitor:
        warnings.simplefilter("always")
        for step in range(22):
            if step == 11:
                model.load_state_dict(later)
            model(input_ids=tokens, use_cache=False)
            if reading := monitor.step():
                sequences.append(reading["sinks/strongest_sequences"])
                alarms.append(reading.get("sinks/alarm_sink_born", 0))
    assert sequences == [4, 16, 16, 16, 16]
    assert alarms == [0, 0, 0, 0, 1]
    assert [(one.step, one.position) for one in monitor.alarms if one.rule == "sink_born"] == [
        (20, 5)
    ]
    assert [str(one.message) for one in told] == [one.sentence for one in monitor.alarms]
    assert monitor.frame()["step"].max() == 22  # the last weights are read


def test_the_loss_is_of_a_token_also_where_the_trainer_divides_it_by_more():
    model, tokens = tiny("llama"), batches(1)[0]
    expected = model(input_ids=tokens, labels=tokens).loss.item()
    for more in ({}, {"num_items_in_batch": 10 * tokens.numel()}):
        with SinkMonitor(model, every=1) as monitor:
            model(input_ids=tokens, labels=tokens, **more)
            assert monitor.step()["sinks/loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("key", "values", "steps"),
    [
        (
            "rate_strongest",
            [0.4, 0.42, 0.38, 0.41, 0.4],
            [],
        ),  # there from the first reading on: no birth
        # Excess 0.06 - 0 - 0.02 at each reading: over 0.05 at the second; the median of what came before is still 0.
        ("rate_strongest", [0, 0, 0, 0, 0, 0.06, 0.06], [300]),
        ("rate_strongest", [0, 0, 0, 0, 0, 0.04, 0.04, 0.04], []),  # under 5% of heads
        ("rate_strongest", [0, 0, 0, 0, 0, 0.12, 0.049, 0.12], []),  # not in two readings in a row
        ("max_activation", [5, 5, 5, 5, 40], [200]),  # an outlier is told by its factor
        ("max_activation", [5, 5.5, 6, 7, 8, 9, 10], []),
    ],
)
def test_an_alarm_is_of_what_changed_by_enough(key, values, steps):
    assert [one.step for one in alarms_of(key, values)] == steps


def test_layers_of_an_alarm_are_those_that_changed():
    alarms = Alarms(threshold=0.3)
    for step, rate in ((0, 0.0), (50, 0.25), (100, 0.25)):
        reading = {None: rate, -1: rate, 0: 0.0, 1: 2 * rate}
        reading = {("rate_strongest", layer): value for layer, value in reading.items()}
        reading |= {("strongest_position", None): 0, ("strongest_sequences", None): 16}
        found = alarms.add_reading(reading, step=step)
    assert [one.layers for one in found] == [(1,)]


def test_committed_births_are_found_within_two_readings():
    frame = pd.read_parquet(monitor_births.READINGS)
    rule = next(rule for rule in RULES if rule.name == "sink_born")
    for every in (10, 50):
        found = monitor_births.score(frame, rule, every=every)
        assert (found.births, found.found, found.false) == (3, 3, 0)


def test_the_table_of_where_nothing_happens_is_that_of_its_rows():
    assert nothing_happens.TABLE.read_text(encoding="utf-8") == nothing_happens.table()


def test_an_alarm_goes_to_the_trackers_with_its_reading(caplog):
    good, fails = Tracker(), Tracker()
    fails.on_log = lambda *given, **named: 1 / 0  # one fails: the other has it
    callback = SinkMonitorCallback(every=1)
    finish = lambda: {"sinks/rate_first": 0.5, "sinks/alarm_sink_born": 1.0}  # noqa: E731
    callback.monitor = SimpleNamespace(finish=finish, steps=4)
    callback._trainer = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[fails, good]))
    state = SimpleNamespace(global_step=4, epoch=None, log_history=[])
    callback.on_step_end(None, state, None)
    assert state.global_step == 4
    assert ["ZeroDivisionError" in one.getMessage() for one in caplog.records] == [True]
    assert good.seen == [
        (4, {"sinks/rate_first": 0.5, "sinks/alarm_sink_born": 1.0, "sinks/step": 3})
    ]
    assert state.log_history == [{**good.seen[0][1], "step": 4}]
