"""A model runs one attention function: the user's own is hooked as it is, or refused; changes of it are noticed."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from own_attention import FUNCTIONS, PATTERNS, batch, scores_of, use
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention

from sink_lens import Reading, capture, generate, run_with, stream, sweep, trace, wrap
from sink_lens.chain.config import TraceConfig
from sink_lens.chain.locate import Location
from sink_lens.chain.screen import screen_parts
from sink_lens.chain.setting import make_setting
from sink_lens.circuits import find
from sink_lens.edits import edit, freeze, isolate, zero
from sink_lens.edits.eviction import window
from sink_lens.edits.metrics import loss, sink_mass
from sink_lens.errors import ModelError, SiteError
from sink_lens.measures import attention
from sink_lens.patching import patch
from sink_lens.sweeps import EditGrid, Grid
from sink_lens.training import SinkMonitor
from tests.tiny_families import tiny


def refused(lens, text):
    for door in (lambda: run_with(lens, batch()), lambda: capture(lens, batch(), sites=["z"])):
        with pytest.raises(ModelError, match=text):
            door()


def test_a_function_without_a_mask_is_refused_and_told_how_to_get_one():
    def all_keys(module, query, key, value, mask, **given):
        return FUNCTIONS["softmax1"](
            module, query, key, value, query.new_zeros(1) if mask is None else mask
        )

    model = tiny("llama")
    with (
        use(model, "all_keys", function=all_keys, mask=None),
        pytest.raises(ModelError, match="AttentionMaskInterface"),
    ):
        wrap(model)
    with use(model, "all_keys", function=all_keys):
        assert wrap(model).own_attention.name == "all_keys"


def test_a_function_that_a_class_never_calls_is_refused():
    model = tiny("gptj")
    model.config._attn_implementation = "softmax1"
    with use(tiny("llama"), "softmax1"), pytest.raises(ModelError, match=r"never calls 'softmax1'"):
        wrap(model)


@pytest.mark.parametrize("name", ["softmax1", "sdpa"])
def test_a_function_that_comes_after_wrap_is_noticed(name):
    model = tiny("llama")
    lens = wrap(model)
    run_with(lens, batch())
    with use(model, name):
        refused(lens, "the attention function is 'softmax1'|the attention function is 'sdpa'")
    run_with(lens, batch())


def test_one_exact_kernel_for_another_is_no_change():
    model = tiny("llama")
    lens = wrap(model)
    model.set_attn_implementation("eager")
    run_with(lens, batch())


def test_attention_that_differs_from_token_9_on_is_found(monkeypatch):
    """Sinks and a window, the way of StreamingLLM: patched into the class before the model is wrapped."""
    before = LlamaAttention.forward

    def windowed(self, hidden_states, *args, attention_mask=None, **kwargs):
        n = hidden_states.shape[1]
        query, key = torch.arange(n)[:, None], torch.arange(n)
        seen = (key <= query) & ((key < 2) | (key > query - 7))
        mask = torch.zeros(1, 1, n, n).masked_fill_(~seen, torch.finfo(torch.float32).min)
        return before(self, hidden_states, *args, attention_mask=mask, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", windowed)
    with pytest.raises(ModelError, match="logits differ"):
        wrap(tiny("llama"))


class Louder(LlamaAttention):
    """Attention that gives twice as much."""

    def forward(self, *args, **kwargs):
        output, pattern = super().forward(*args, **kwargs)
        return 2 * output, pattern


CHANGES = {
    "layer_types of the configuration": lambda model, patch: model.config.layer_types.__setitem__(
        0, "other"
    ),
    "layers.1.self_attn is .*Louder": lambda model, patch: setattr(
        model.model.layers[1].self_attn, "__class__", Louder
    ),
    "LlamaAttention.forward": lambda model, patch: patch.setattr(
        LlamaAttention, "forward", Louder.forward
    ),
    "nn.Linear|Linear.forward": lambda model, patch: patch.setattr(
        nn.Linear, "forward", Louder.forward
    ),
    "modeling_llama.apply_rotary_pos_emb": lambda model, patch: patch.setattr(
        modeling_llama, "apply_rotary_pos_emb", lambda q, k, *args: (q, k)
    ),
    "eager_attention_forward": lambda model, patch: patch.setattr(
        modeling_llama, "eager_attention_forward", lambda *args: None
    ),
    "rope_parameters of the configuration": lambda model, patch: (
        model.config.rope_parameters.update(rope_theta=3.0)
    ),
}


@pytest.mark.parametrize("text", CHANGES)
def test_code_classes_and_lists_that_change_are_noticed(text, monkeypatch):
    model = tiny("gemma2") if "layer_types" in text else tiny("llama", attn_implementation="eager")
    lens = wrap(model)
    run_with(lens, batch())
    CHANGES[text](model, monkeypatch)
    refused(lens, text)


def test_a_function_under_the_name_of_one_of_transformers_is_told_from_it():
    with use(model := tiny("llama"), "sdpa"):
        assert str(wrap(model).own_attention) == "'sdpa' (softmax1)"
    assert AttentionInterface()["sdpa"] is sdpa_attention_forward
    assert wrap(model).own_attention is None


class Raw:
    """The model in eager code, without this library: attention with an edit of the pattern, z or v of one layer."""

    def __init__(self, name, *, site=None, layer=1):
        self.name, self.site, self.layer, self.patterns = name, site, layer, {}

    def __call__(self, module, query, key, value, mask, scaling=None, dropout=0.0, **given):
        own = module.layer_idx == self.layer
        pattern = PATTERNS[self.name](scores_of(query, key, mask, scaling), query)
        self.patterns[module.layer_idx] = pattern
        if own and self.site == "pattern":
            pattern = pattern.clone()
            pattern[:, 1, 7:, 0] *= 3
        if own and self.site == "v":
            value = value.clone()
            value[:, 1, 5:] *= 3
        z = pattern @ value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        if own and self.site == "z":
            z = z.clone()
            z[:, 2, 3:] *= 3
        return z.transpose(1, 2).contiguous(), None


EDITS = {
    "pattern": lambda: edit(
        "pattern", lambda x, at: x * 3, layers=[1], heads=[1], positions=range(7, 19), keys=[0]
    ),
    "v": lambda: edit("v", lambda x, at: x * 3, layers=[1], heads=[1], positions=range(5, 19)),
    "z": lambda: edit("z", lambda x, at: x * 3, layers=[1], heads=[2], positions=range(3, 19)),
}


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "gpt2",
        "gpt_neox",
        *(
            pytest.param(one, marks=pytest.mark.exhaustive)
            for one in ("qwen3", "phi3", "gemma3", "opt", "mixtral")
        ),
    ],
)
def test_every_path_gives_the_numbers_of_the_users_own_function(name, family):
    model, tokens = tiny(family), batch()
    with use(model, name), torch.no_grad():
        lens = wrap(model)
        for site in (None, *EDITS):
            raw = Raw(name, site=site)
            with use(model, "raw", function=raw):
                wanted = model(tokens.tokens, use_cache=False).logits
            found = run_with(
                lens, tokens, [] if site is None else EDITS[site](), logits=True, sites=["pattern"]
            )
            assert (found.logits - wanted).abs().max() < 1e-5 * wanted.abs().max(), site
            if site is None:
                patterns = raw.patterns
        seen = {
            layer: slice(1, lens.reach(layer)) for layer in range(lens.n_layers)
        }  # by queries that can see the key
        mass = torch.stack([patterns[layer][:, :, seen[layer], 0].mean(-1) for layer in seen])
        assert torch.allclose(run_with(lens, tokens).mass[..., 0], mass, atol=1e-5)
        for path in ("plain", "bridge"):
            assert torch.allclose(
                capture(lens, tokens, sites=["pattern"], path=path)["pattern", 1],
                patterns[1],
                atol=1e-5,
            )
        seen = stream(
            lens,
            tokens,
            [Reading(name="first", sites=("mass",), function=lambda v: v["mass"])],
            keys=(0,),
        )
        assert torch.allclose(seen.values["first"][1][..., 0], patterns[1][..., 0], atol=1e-5)
        assert torch.allclose(
            lens.bridge(tokens.tokens, use_cache=False), run_with(lens, tokens, logits=True).logits
        )


@pytest.mark.parametrize("name", PATTERNS)
def test_patches_sweeps_and_the_monitor_run_the_users_own_function(name, tmp_path):
    model, clean, corrupted = tiny("llama"), batch(), batch(1)
    with use(model, name):
        lens = wrap(model)
        found = patch(
            lens,
            clean,
            corrupted,
            site="z",
            by=("layer",),
            metric="loss",
            controls=0,
            progress=False,
        )
        swept = sweep(
            lens,
            Grid(edits=(EditGrid(kind="zero", site="z", layers=(1,)),), controls=0),
            tokens=clean,
            metrics=[loss()],
            out=tmp_path / "run",
            progress=False,
        )
        z = capture(lens, clean, sites=["z"])["z", 1]
        assert found.frame["value"][1] == pytest.approx(
            run_with(lens, corrupted, freeze("z", {1: z})).loss.double().mean().item(), abs=1e-5
        )
        assert swept.frame["value"].item() == pytest.approx(
            run_with(lens, clean, zero("z", layers=[1])).loss.double().mean().item(), abs=1e-5
        )
        with SinkMonitor(model, every=1, sequences=2) as monitor:
            model(input_ids=clean.tokens, labels=clean.tokens).loss.backward()
            row = monitor.step()
        pattern = capture(lens, clean, sites=["pattern"])["pattern", 2]
    assert row["sinks/mass_first/layer_2"] == pytest.approx(
        pattern[:, :, 1:, 0].mean().item(), abs=1e-5
    )


class Hidden:
    """The model in eager code: keys of ``hidden`` (query, key) get no attention in any layer."""

    def __init__(self, name, hidden):
        self.name, self.hidden, self.patterns = name, hidden, []

    def __call__(self, module, query, key, value, mask, scaling=None, **given):
        scores = scores_of(query, key, mask, scaling).masked_fill(self.hidden, -1e9)
        pattern = PATTERNS[self.name](scores, query)
        self.patterns.append(pattern)
        return (
            pattern @ value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        ).transpose(1, 2), None

    def run(self, model, tokens):
        """Loss of each sequence, and patterns by layer."""
        with use(model, "raw", function=self), torch.no_grad():
            logits = model(tokens, use_cache=False).logits
        loss = nn.functional.cross_entropy(
            logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none"
        )
        return loss.mean(), torch.stack(self.patterns)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        pytest.param(
            name,
            family,
            marks=() if (name, family) == ("softmax1", "llama") else pytest.mark.exhaustive,
        )
        for name in PATTERNS
        for family in ("llama", "gpt2", "gpt_neox")
    ],
)
@pytest.mark.filterwarnings("ignore:the edit")
def test_a_trace_measures_and_intervenes_under_the_users_own_function(
    name, family, tmp_path, monkeypatch
):
    """Random models have no sink: the threshold is one that uniform attention passes, and what sees that is off."""
    monkeypatch.setattr(attention, "fewest_tokens", lambda threshold: 10)
    model, tokens, n = tiny(family), batch(n=4, length=24), 24
    low = {"threshold": 0.05, "min_sink_rate": 0.01, "controls": 1, "intervention_sequences": 4}
    with use(model, name):
        lens = wrap(model)
        result = trace(
            lens,
            tokens,
            random_init=False,
            report=False,
            out=tmp_path / "run",
            progress=False,
            **low,
        )
        position, target = result.location.sink_positions[0], n // 3
        heads = result.tables["heads"].query("layer == 1").sort_values("head")
        effects = result.tables["effects"].query("link == 'aggregation_variance'")
        isolated = effects.set_index("edit").loc["isolation"]
        query, key = torch.arange(n)[:, None], torch.arange(n)
        _, patterns = Hidden(name, torch.zeros(n, n, dtype=torch.bool)).run(model, tokens.tokens)
        loss, of_isolated = Hidden(name, (query == target) & (key < target)).run(
            model, tokens.tokens
        )
        without, _ = Hidden(name, (query >= max(position + 1, n // 4)) & (key == position)).run(
            model, tokens.tokens
        )
    assert heads["sink_mass"].to_numpy() == pytest.approx(
        patterns[1, :, :, position + 1 :, position].mean((0, 2)).numpy(), abs=1e-5
    )
    reads = [
        int(layer) for layer in isolated["read_layers"].replace("-", " ").replace(",", " ").split()
    ]
    reads = range(reads[0], reads[-1] + 1)
    assert isolated["target_mass"] == pytest.approx(
        of_isolated[list(reads), :, :, target + 1 :, target].mean().item(), abs=1e-5
    )
    assert isolated["loss_nats"] == pytest.approx(loss.item(), abs=1e-5)
    assert isolated["masked_loss_nats"] == pytest.approx(without.item(), abs=1e-5)
    sums = patterns.sum(-1)
    may_be_nothing = bool(sums.max() <= 1.01 and sums.mean() < 0.98)
    assert may_be_nothing or name not in ("softmax1", "gated")
    assert ("goes to no key" in result.headline) == may_be_nothing
    assert "sink_logit_rate" not in set(
        result.tables["summary"]["quantity"]
    )  # no logit was learned for it


def test_the_screen_of_makers_has_the_gradients_of_the_users_own_function():
    """The last layer's attention to the sink, by z of the layer before: raw autograd, times each head's change."""
    model, tokens = tiny("llama"), batch(n=3, length=20)
    with use(model, "softmax1"):
        lens = wrap(model)
        config, location = (
            TraceConfig(intervention_sequences=3),
            Location(sink_positions=(0,), sink_found=True, steps=(), outliers={}),
        )
        setting = make_setting(lens, tokens, location=location, config=config)
        setting = dataclasses.replace(setting, read_layers=(2,))
        found = (
            screen_parts(setting, target="sink")
            .query("kind == 'head' and layer == 1")["gradient"]
            .to_numpy()
        )
        change = setting.baseline_tensors("z", layers=[1])[1]
        change = (change[:, 0] - setting.mean_ordinary(change)[:, 0]).float()
        shape, patterns = change.shape, {}

        def raw(module, query, key, value, mask, scaling=None, **given):
            pattern = patterns[module.layer_idx] = PATTERNS["softmax1"](
                scores_of(query, key, mask, scaling), query
            )
            z = (
                pattern @ value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
            ).transpose(1, 2)
            if module.layer_idx == 1:
                z = torch.cat([z[:, :1] + more[:, None], z[:, 1:]], dim=1)
            return z.contiguous(), None

        more = torch.zeros(shape, requires_grad=True)
        with use(model, "raw", function=raw):
            model(tokens.tokens, use_cache=False)
        patterns[2][:, :, 1:, 0].mean((1, 2)).sum().backward()
    wanted = (more.grad * change).sum(-1).mean(0).numpy()
    assert found / found[0] == pytest.approx(wanted / wanted[0], rel=1e-4)


def test_keys_are_hidden_by_the_mask_and_a_function_that_ignores_it_is_refused(tmp_path):
    def causal(module, query, key, value, mask, scaling=None, **given):
        return FUNCTIONS["softmax1"](module, query, key, value, None, scaling)

    model = tiny("llama")
    with use(model, "own", function=causal):
        lens = wrap(model)
        for hiding in (isolate([5]), window(4)):
            with pytest.raises(SiteError, match=r"'own' .* attention_mask"):
                run_with(lens, batch(), hiding)
        with pytest.warns(UserWarning, match="mask hides"):
            trace(
                lens,
                batch(n=4, length=24),
                random_init=False,
                report=False,
                progress=False,
                out=tmp_path / "run",
            )


def _of_values(change):
    """A function that is not linear in the values, or not the same in each of their dimensions."""

    def attend(module, query, key, value, mask, scaling=None, **given):
        output, _ = FUNCTIONS["softmax1"](module, query, key, value, mask, scaling)
        return change(output, query, value), None

    return attend


NOT_LINEAR = {
    "tanh": lambda out, query, value: out.tanh(),
    "normed": lambda out, query, value: out / out.norm(dim=-1, keepdim=True),
    "squared": lambda out, query, value: out * out,
    "shifted": lambda out, query, value: out + 0.1,
    "gated by dimension": lambda out, query, value: out * query.transpose(1, 2).sigmoid(),
    "turned": lambda out, query, value: out.flip(-1),
}


@pytest.mark.parametrize("change", NOT_LINEAR)
def test_a_function_that_is_not_linear_in_the_values_has_no_pattern(change):
    model, tokens = tiny("llama"), batch()
    with use(model, "own", function=_of_values(NOT_LINEAR[change])), torch.no_grad():
        lens = wrap(model)
        found = run_with(lens, tokens, logits=True)
        assert torch.equal(found.logits, model(tokens.tokens, use_cache=False).logits)
        assert found.mass.isnan().all()
        for door in (
            lambda: run_with(lens, tokens, zero("pattern", layers=[1])),
            lambda: run_with(lens, tokens, sites=["pattern"]),
            lambda: capture(lens, tokens, sites=["pattern"]),
            lambda: stream(
                lens,
                tokens,
                [Reading(name="a", sites=("mass",), function=lambda v: v["mass"])],
                keys=(0,),
            ),
            lambda: patch(
                lens, tokens, batch(1), site="z", metric=sink_mass(0), by=("layer",), progress=False
            ),
        ):
            with pytest.raises(SiteError, match=r"'own' .* has no 'pattern'"):
                door()


def test_a_text_is_generated_as_hugging_face_does():
    model, ids = tiny("llama"), batch().tokens[:1, :6]
    with use(model, "softmax1"), torch.no_grad():
        found = generate(wrap(model), ids, zero("z", layers=[1]), max_new_tokens=6)
        options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        wanted = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert found.plain_ids == tuple(wanted[0, 6:].tolist())
    assert found.ids != found.plain_ids


def test_the_code_of_the_page_on_families_runs():
    page = (Path(__file__).parents[2] / "docs" / "families.md").read_text(encoding="utf-8")
    (block,) = (
        one
        for one in re.findall(r"^```python\n(.*?)^```", page, flags=re.M | re.S)
        if "softmax1" in one
    )
    code, _, _ = block.replace("sink_lens.load().plain", "tiny('llama')").rpartition("result =")
    names = {"tiny": tiny}
    with use(tiny("llama"), "softmax1"):  # what the page registers is taken away again
        exec(compile(code, "families.md", "exec"), names)
        wanted = run_with(names["lens"], batch(), logits=True).logits
        with use(names["model"], "softmax1"):
            assert torch.allclose(
                names["model"](batch().tokens, use_cache=False).logits, wanted, atol=1e-5
            )


def test_scores_of_ones_own_function_are_refused_by_name():
    with use(model := tiny("llama"), "softmax1"):
        lens = wrap(model)
        for door in (
            lambda: run_with(lens, batch(), zero("scores", layers=[1])),
            lambda: capture(lens, batch(), sites=["scores"]),
        ):
            with pytest.raises(SiteError, match=r"scores|pattern"):
                door()


def test_circuits_of_ones_own_function_are_refused_with_the_way_out():
    with (
        use(model := tiny("llama"), "softmax1"),
        pytest.raises(ModelError, match=r"set_attn_implementation"),
    ):
        find(wrap(model), batch(), batch(1), metric=loss())
