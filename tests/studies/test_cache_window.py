"""A mask against a cache that really evicts, token by token; and what ``streaming`` decides on planted models."""

import json

import pytest
import torch
from rounding import assert_close
from transformers import DynamicCache

from sink_lens.edits.eviction import first_tokens, window
from sink_lens.engine.forward import run_with
from sink_lens.errors import InputError
from sink_lens.models.load import wrap
from sink_lens.models.tiny import TINY_FAMILIES, planted, tiny, tiny_tokenizer
from sink_lens.studies import cache_window as module
from sink_lens.studies.cache_window import Cache, rotary_frequencies, streaming, token_losses, turned_back
from sink_lens.studies.config import StreamingConfig

LENGTH, SIZE = 20, 7
TOKENS = torch.randint(3, 300, (2, LENGTH), generator=torch.Generator().manual_seed(0))
ROTARY = [name for name in TINY_FAMILIES if name not in ("gpt2", "opt")]
NO_WINDOW = ("llama", "qwen2", "qwen3", "olmo2", "gpt_neox")
INNER = torch.zeros(2, LENGTH, dtype=torch.bool)
INNER[0, [0, 4]] = True
INNER[1, 2] = True


def turned(keys, places, *, frequencies):
    """Keys turned on by a number of positions, as complex numbers."""
    n = len(frequencies)
    pairs = torch.complex(keys[..., :n].double(), keys[..., n : 2 * n].double())
    pairs = pairs * torch.polar(torch.ones(n, dtype=torch.float64), places * frequencies.double())
    return torch.cat([pairs.real.to(keys.dtype), pairs.imag.to(keys.dtype), keys[..., 2 * n :]], dim=-1)


def generated(model, tokens, kept, *, size, frequencies=None):
    """Losses of a real cache, one token after the other: entries are cut out, and moved closer if positions are new."""
    losses = []
    for row, keep in zip(tokens, kept, strict=True):
        cache, held, found = DynamicCache(config=model.config), [], []
        for token in range(len(row)):
            if len(held) == size:
                leaving = next(at for at, one in enumerate(held) if not keep[one])
                stay = [at for at in range(size) if at != leaving]
                for number, layer in enumerate(cache.layers):
                    keys = layer.keys[:, :, stay]
                    if frequencies is not None:  # those after it move one place closer to the start
                        after = turned(keys[:, :, leaving:], -1, frequencies=frequencies[number])
                        keys = torch.cat([keys[:, :, :leaving], after], dim=2)
                    layer.keys, layer.values = keys, layer.values[:, :, stay]
                del held[leaving]
            place = token if frequencies is None else len(held)
            held.append(token)
            with torch.no_grad():
                out = model(
                    input_ids=row[None, token, None],
                    position_ids=torch.tensor([[place]]),
                    attention_mask=torch.zeros(1, 1, 1, len(held)),
                    past_key_values=cache,
                    use_cache=True,
                )
            if token + 1 < len(row):
                found.append(torch.nn.functional.cross_entropy(out.logits[0, -1:], row[None, token + 1]))
        losses.append(torch.stack(found))
    return torch.stack(losses)


KEPT = {f"first {n}": first_tokens(n, sequences=2, length=LENGTH) for n in (0, 1, 3)} | {"inner": INNER}


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("family", NO_WINDOW)
def test_the_mask_gives_the_losses_of_a_real_cache(family, kept):
    model = tiny(family)
    found = token_losses(wrap(model), TOKENS, cache=Cache(size=SIZE, kept=KEPT[kept]))
    assert torch.allclose(found[:, :-1], generated(model, TOKENS, KEPT[kept], size=SIZE), atol=1e-5)
    assert found[:, -1].isnan().all()


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("family", NO_WINDOW)
def test_queries_turned_back_give_the_losses_of_a_real_cache_with_new_positions(family, kept):
    model = tiny(family)
    lens = wrap(model)
    found = token_losses(lens, TOKENS, cache=Cache(size=SIZE, kept=KEPT[kept], reindexed=True))
    wanted = generated(model, TOKENS, KEPT[kept], size=SIZE, frequencies=rotary_frequencies(lens))
    assert torch.allclose(found[:, :-1], wanted, atol=1e-5)
    if kept != "first 0":  # nothing kept: the newest tokens keep their distances
        stays = token_losses(lens, TOKENS, cache=Cache(size=SIZE, kept=KEPT[kept]))
        assert not torch.allclose(found[:, SIZE:-1], stays[:, SIZE:-1], atol=1e-4)


def test_learned_positions_stay_and_equal_a_real_cache():
    model = tiny("gpt2")
    lens, kept = wrap(model), KEPT["first 3"]
    found = token_losses(lens, TOKENS, cache=Cache(size=SIZE, kept=kept))
    assert torch.allclose(found[:, :-1], generated(model, TOKENS, kept, size=SIZE), atol=1e-5)
    with pytest.raises(InputError, match="GPT2LMHeadModel has no rotary embedding that can be read"):
        token_losses(lens, TOKENS, cache=Cache(size=SIZE, kept=kept, reindexed=True))


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_the_pass_with_a_cache_is_the_window_edit_on_the_bridge(family):
    lens = wrap(tiny(family))
    found = token_losses(lens, TOKENS, cache=Cache(size=SIZE, kept=INNER))
    edited = run_with(lens, TOKENS, window(SIZE, keep=INNER), layers=[0])
    assert torch.allclose(found[:, :-1].mean(1), edited.loss, atol=1e-5)
    full, clean = token_losses(lens, TOKENS), run_with(lens, TOKENS, layers=[0])
    assert torch.allclose(full[:, :-1].mean(1), clean.loss, atol=1e-5)


@pytest.mark.parametrize("family", ROTARY)
def test_a_cache_that_evicts_nothing_is_the_full_one_with_new_positions_too(family):
    lens, kept = wrap(tiny(family)), first_tokens(2, sequences=2, length=LENGTH)
    found = token_losses(lens, TOKENS, cache=Cache(size=LENGTH, kept=kept, reindexed=True))
    assert_close(found[:, :-1], token_losses(lens, TOKENS)[:, :-1])
    moved = token_losses(lens, TOKENS, cache=Cache(size=SIZE, kept=kept, reindexed=True), batch_size=1)
    assert moved[:, :-1].isfinite().all()


def test_a_query_turned_back_is_the_query_at_the_earlier_position():
    frequencies = torch.tensor([1.0, 0.01])
    query = torch.tensor([[[[1.0, 2.0, 3.0, 4.0, 9.0]]]])
    back = turned_back(query, torch.tensor([[3]]), frequencies)
    assert torch.allclose(back, turned(query, -3, frequencies=frequencies), atol=1e-6)
    assert torch.allclose(turned(back, 3, frequencies=frequencies), query, atol=1e-6)


@pytest.mark.parametrize("length", [4, 5])
def test_a_text_that_is_hardly_longer_than_the_cache_has_new_positions_too(length):
    kept = first_tokens(1, sequences=2, length=length)
    found = token_losses(wrap(tiny("llama")), TOKENS[:, :length], cache=Cache(size=2, kept=kept, reindexed=True))
    assert torch.isfinite(found[:, :-1]).all()


def test_another_rotation_than_the_expected_one_is_refused(monkeypatch):
    lens, kept = wrap(tiny("llama")), KEPT["first 1"]
    monkeypatch.setattr(module, "rotary_frequencies", lambda lens: tuple(2 * one for one in rotary_frequencies(lens)))
    with pytest.raises(InputError, match="not the rotation that was expected"):
        token_losses(lens, TOKENS, cache=Cache(size=SIZE, kept=kept, reindexed=True))


def lens_of(*, sink):
    return wrap(planted(sink=sink).model, tokenizer=tiny_tokenizer(adds_bos=True))


SMALL = {"sequences": 6, "length": 40, "window": 12, "progress": False}


def test_the_run_holds_every_condition_of_both_parts_and_the_decision(tmp_path):
    study = streaming(lens_of(sink=True), out=tmp_path / "run", keep=[0, 1, 4], controls=2, **SMALL)
    losses = study.tables["losses"]
    assert set(losses["kept"]) >= {"full", "0", "1", "4"}
    assert losses.loc[losses["part"] == "choose", "n"].eq(3).all()
    row = study.tables["summary"].iloc[0]
    judged = losses[(losses["part"] == "judge")].drop_duplicates("kept").set_index("kept")
    assert row["full_loss_nats"] == judged.loc["full", "loss_nats"]
    assert row["verdict"] in ("keep", "keep none", "not confirmed")
    assert study.decision["recommended"] == row["recommended"]
    assert study.headline == row["sentence"]
    positions = study.tables["positions"]
    assert positions.groupby("kept").size().eq(39).all()
    before = positions[positions["position"] < 11].pivot_table(index="position", columns="kept", values="loss_nats")
    assert before.sub(before["full"], axis=0).abs().max().max() < 1e-6  # nothing has left the cache yet
    assert json.loads(json.dumps(study.decision["sentence"]))


def decided(kept, *, chosen=None, sequences=8):
    """What is decided of losses that are typed in: kept -> loss, on both halves."""
    noise = torch.linspace(-0.01, 0.01, sequences)
    config = StreamingConfig(keep=tuple(sorted(int(one) for one in kept if one != "full")))
    means, first = (
        {one: torch.full((sequences,), loss) + noise * (index + 1) for index, (one, loss) in enumerate(some.items())}
        for some in (kept, chosen or kept)
    )
    recommended = module._recommend(first, config=config)
    known = {"baseline": means["full"], "worst": means["0"], "best": means["full"], "seed": 0}
    rows = [
        {"part": "judge", "kept": one, "tokens": 0.0} | module.loss_row(loss, **known) for one, loss in means.items()
    ]
    return module._decision(lens_of(sink=True), config, rows, means, recommended=recommended, marked=float("nan"))


def test_the_fewest_tokens_that_gain_nearly_all_are_recommended():
    found = decided({"full": 3.0, "0": 8.0, "1": 4.0, "2": 3.2, "4": 3.1})
    assert (found["verdict"], found["recommended"]) == ("keep", 2)  # 1 gains 4 of 4.9, 2 gains 4.8
    assert found["gain_nats"] == pytest.approx(4.8, abs=1e-5)
    assert found["closed_share"] == pytest.approx(4.8 / 5, abs=1e-5)
    assert (
        "Keep the first 2 tokens: beyond a cache of 64 tokens, on held-out text, the loss is 3.2" in found["sentence"]
    )


def test_no_token_is_kept_where_none_gains_anything():
    found = decided({"full": 3.0, "0": 3.2, "1": 3.198, "2": 3.3})
    assert (found["verdict"], found["recommended"]) == ("keep none", 0)
    assert "Keep no first token" in found["sentence"]


def test_a_gain_that_held_out_text_does_not_show_is_not_confirmed():
    found = decided({"full": 3.0, "0": 3.1, "1": 3.12}, chosen={"full": 3.0, "0": 3.5, "1": 3.0})
    assert (found["verdict"], found["recommended"], found["chosen"]) == ("not confirmed", 0, 1)
    assert "helped on the text they were chosen on" in found["sentence"]


def test_what_cannot_be_streamed_is_refused(tmp_path):
    lens = lens_of(sink=True)
    with pytest.raises(InputError, match="the shortest sequence has 12 tokens and the window 12"):
        streaming(lens, out=tmp_path / "run", **(SMALL | {"length": 12}))
    with pytest.raises(InputError, match="3 sequences were given; need at least 4"):
        streaming(lens, out=tmp_path / "run", **(SMALL | {"sequences": 3}))
    for fields, said in (
        ({"keep": (1, 2)}, "need 0, with which the others are compared"),
        ({"window": 8}, "a window of 8 cannot keep 8 tokens"),
        ({"positions": "shift"}, "positions is 'shift'"),
        ({"goal": 0.0}, "goal is 0.0"),
    ):
        with pytest.raises(InputError, match=said):
            StreamingConfig(**fields)
    with pytest.raises(InputError, match="the kept tokens have the shape"):
        token_losses(lens, TOKENS, cache=Cache(size=4, kept=INNER[:, :5]))
