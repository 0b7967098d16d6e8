"""A run is the model's own forward pass, whole or in parts, and reads what capture reads."""

import functools

import pytest
import torch
from lenses import stock_opt
from rounding import assert_close, assert_moved, assert_rows_close
from spying import spied

from sink_lens.activations.record import capture
from sink_lens.data.tokens import from_tensor
from sink_lens.edits.constructors import edit, freeze, scale, zero
from sink_lens.engine.forward import run_with
from sink_lens.errors import InputError, SiteError
from sink_lens.models.delegation import start_passes_at
from sink_lens.models.load import wrap
from sink_lens.models.tiny import VOCAB_SIZE
from sink_lens.models.unembedding import next_token_losses
from tests.tiny_families import TINY_FAMILIES, tiny

BATCH, LENGTH = 3, 14
EDITS = (
    scale("mlp_out", 1.5, layers=[1], positions=[2]),
    zero("z", layers=[2], heads=[1]),
    scale("final", 2.0),
)


def tokens(seed=1, batch=BATCH):
    return torch.randint(
        3, VOCAB_SIZE, (batch, LENGTH), generator=torch.Generator().manual_seed(seed)
    )


@functools.cache
def unedited(lens):
    sites = ("resid_pre", "pattern", "resid_post", "final")
    return run_with(lens, tokens(), sites=sites, positions=(0, 4), logits=True)


def losses_by_hand(logits, ids, lengths):
    """Mean over real targets of minus the log-probability, position by position."""
    found = []
    for logs, sequence, length in zip(logits.log_softmax(-1), ids, lengths, strict=True):
        found.append(-sum(logs[t, sequence[t + 1]] for t in range(length - 1)) / (length - 1))
    return torch.stack(found)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_without_edits_logits_and_loss_are_the_raw_model_s(lens_of, raw_run, family):
    found, expected = unedited(lens_of(family)), raw_run(family, tokens())
    assert_rows_close(found.logits, expected)
    assert_close(found.loss, losses_by_hand(expected, tokens(), [LENGTH] * BATCH))


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_mass_and_state_are_those_of_the_captured_pattern_and_stream(lens_of, family):
    lens = lens_of(family)
    found = unedited(lens)
    bridge = capture(lens, tokens(), sites=("pattern", "resid_post"), path="bridge")
    assert found.mass.shape == (3, BATCH, 4, 2)
    assert found.state.shape == (3, BATCH, 2, 48)
    for layer in range(3):
        pattern, reach = bridge["pattern", layer], lens.reach(layer)
        if lens.family.sigmoid:  # rows sum to anything: a weight is a share of its row
            pattern = pattern / pattern.sum(-1, keepdim=True)
        for place, key in enumerate((0, 4)):
            after = pattern[:, :, key + 1 : None if reach is None else key + reach, key]
            torch.testing.assert_close(found.mass[layer, ..., place], after.mean(-1))
            assert_rows_close(found.state[layer, :, place], bridge["resid_post", layer][:, key])
        assert_rows_close(found.tensors["pattern", layer], bridge["pattern", layer])
    torch.testing.assert_close(found.mass_at(4, layers=[2, 1]), found.mass[1:, ..., 1].mean((0, 2)))
    assert torch.equal(found.state_at(4), found.state[:, :, 1])


def test_mass_and_sites_are_read_after_the_edits(lens_of):
    equal = edit("pattern", lambda x, at: torch.full_like(x, 0.25).tril(), layers=[1])
    found = run_with(lens_of("llama"), tokens(), equal, positions=(3,), sites=("pattern",))
    assert torch.equal(found.mass[1], torch.full((BATCH, 4, 1), 0.25))
    assert (found.tensors["pattern", 1] == torch.full((LENGTH, LENGTH), 0.25).tril()).all()
    assert_close(found.mass[0], run_with(lens_of("llama"), tokens(), positions=(3,)).mass[0])


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_run_in_pieces_is_the_run_in_one(lens_of, family):
    lens = lens_of(family)
    values = torch.randn(BATCH, LENGTH, 48, generator=torch.Generator().manual_seed(3))
    edits = (*EDITS, freeze("attn_out", {0: values}))  # each sequence gets its own
    options = {"sites": ("resid_post", "z"), "logits": True, "positions": (0, 5)}
    whole = run_with(lens, tokens(), edits, **options)
    assert_moved(whole.logits, unedited(lens).logits)
    for size in (1, 2):
        found = run_with(lens, tokens(), edits, batch_size=size, **options)
        for name in ("mass", "loss"):
            assert_close(getattr(found, name), getattr(whole, name))
        for name in ("state", "logits"):
            assert_rows_close(getattr(found, name), getattr(whole, name))
        assert found.tensors.keys() == whole.tensors.keys()
        for place, tensor in whole.tensors.items():
            assert_rows_close(found.tensors[place], tensor, place)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_padding_on_the_right_never_matters(lens_of, family):
    lens = lens_of(family)
    lengths = torch.tensor([14, 9, 11])
    one, other = (from_tensor(tokens(), lengths=lengths) for _ in range(2))
    beyond = ~other.valid
    other.tokens[beyond] = tokens(seed=7)[beyond]
    runs = [run_with(lens, batch, EDITS, positions=(0, 4), logits=True) for batch in (one, other)]
    for name in ("mass", "loss"):
        assert_close(*(getattr(found, name) for found in runs))
    assert_rows_close(*(found.state for found in runs))
    assert_rows_close(*(found.logits[one.valid] for found in runs))
    alone = run_with(lens, tokens()[1:2, :9], EDITS, positions=(0, 4), logits=True)
    assert_close(runs[0].mass[:, 1:2], alone.mass)
    assert_close(runs[0].loss[1:2], alone.loss)
    assert_close(runs[0].loss, losses_by_hand(runs[0].logits, tokens(), [14, 9, 11]))


def test_the_loss_of_a_single_token_and_the_mass_of_a_last_one_are_undefined(lens_of):
    batch = from_tensor(tokens(batch=2), lengths=torch.tensor([1, 5]))
    found = run_with(lens_of("llama"), batch, positions=(0, 4))
    assert found.loss.isnan().tolist() == [True, False]
    assert found.mass[0, :, 0].isnan().tolist() == [[True, True], [False, True]]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gptj", "gpt_neo", "falcon", "bloom"])
def test_any_number_of_layers_is_skipped(family):
    """Each skipped block gives what the next takes: of some families the stream, of others a tuple that holds it."""
    more = {"attention_types": [[["global", "local"], 4]]} if family == "gpt_neo" else {}
    lens = wrap(tiny(family, num_hidden_layers=8, **more))
    whole = run_with(lens, tokens(), sites=("resid_pre",), logits=True)
    with torch.no_grad(), start_passes_at(lens, 7, whole.tensors["resid_pre", 7]):
        assert_rows_close(lens.bridge(tokens()), whole.logits)


def test_skipped_layers_are_given_back_after_an_error(lens_of):
    lens = lens_of("llama")
    with pytest.raises(KeyError), start_passes_at(lens, 2, unedited(lens).tensors["resid_pre", 2]):
        raise KeyError
    assert torch.equal(run_with(lens, tokens(), logits=True).logits, unedited(lens).logits)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_run_ends_after_the_last_layer_that_is_read(lens_of, family):
    lens, ran = lens_of(family), []
    with spied(dict(enumerate(lens.bridge.blocks)), lambda layer, output: ran.append(layer)):
        found = run_with(
            lens, tokens(), layers=[1], sites=("resid_post",), positions=(0, 4), loss=False
        )
    assert ran == [0, 1]
    assert (found.loss, found.logits, found.layers) == (None, None, (1,))
    whole = unedited(lens)
    assert_close(found.mass[0], whole.mass[1])
    assert_rows_close(found.state[0], whole.state[1])
    assert_rows_close(found.tensors["resid_post", 1], whole.tensors["resid_post", 1])


def test_what_was_read_is_the_caller_s_own(lens_of):
    lens = lens_of("llama")
    found = run_with(lens, tokens(), sites=("resid_pre", "resid_post"))
    found.tensors["resid_post", 0].zero_()
    assert found.tensors["resid_pre", 1].any()
    assert found.state.any()


def test_what_is_named_twice_is_read_once(lens_of):
    lens = lens_of("llama")
    once = run_with(lens, tokens(), sites=("z", "resid_post"), layers=[1], batch_size=2)
    twice = run_with(
        lens,
        tokens(),
        sites=("z", "resid_post", "z"),
        layers=[1, -2],
        positions=(0, 0),
        batch_size=2,
    )
    assert twice.tensors.keys() == once.tensors.keys()
    for place, tensor in once.tensors.items():
        assert_close(twice.tensors[place], tensor)
    for position in range(2):
        assert_close(twice.state[:, :, position], once.state[:, :, 0])
        assert_close(twice.mass[..., position], once.mass[..., 0])


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"layers": [3]}, InputError, "layer 3 does not exist; need 0 to 2"),
        ({"layers": []}, InputError, "no layers were given; need at least one to read"),
        ({"positions": []}, InputError, "no positions were given; need at least one to read"),
        ({"positions": [14]}, InputError, "position 14 is outside the sequences; need 0 to 13"),
        ({"sites": ["mlp"]}, SiteError, "no site 'mlp'; it is called 'mlp_out'"),
        (
            {"sites": ["final"], "loss": False},
            SiteError,
            "'final' is computed after the last layer; need loss=True or",
        ),
        ({"batch_size": 0}, InputError, "batch size is 0; need at least 1"),
    ],
)
def test_what_cannot_be_read_is_refused(lens_of, options, error, text):
    with pytest.raises(error, match=text):
        run_with(lens_of("llama"), tokens(), **options)


def test_a_bridge_that_does_not_show_its_attention_is_refused():
    with pytest.raises(
        SiteError, match="delegates its attention to a kernel that gives no pattern; need the eager"
    ):
        run_with(stock_opt("sdpa"), tokens())
    with pytest.raises(SiteError, match=r"delegates its attention .*'scores'"):
        run_with(stock_opt(), tokens(), sites=("scores",))


def test_a_loss_over_a_large_vocabulary_is_right_to_1e_5():
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(1, 33, 262_144, generator=generator)
    tokens = torch.randint(262_144, (1, 33), generator=generator)
    found = next_token_losses(logits, tokens)[0]
    wanted = torch.nn.functional.cross_entropy(
        logits[0, :-1].double(), tokens[0, 1:], reduction="none"
    )
    assert float((found - wanted).abs().max()) < 1e-5  # cross_entropy in float32 on a CPU: 6.6e-5


def test_the_loss_of_each_token_is_that_of_transformer_lens_and_undefined_at_padding(lens_of):
    lens, batch = lens_of("llama"), tokens()
    theirs = lens.bridge(batch, return_type="loss", loss_per_token=True)
    torch.testing.assert_close(
        run_with(lens, batch).token_loss, theirs.detach(), rtol=1e-5, atol=1e-5
    )
    padded = from_tensor(batch, lengths=torch.tensor([5, *[batch.shape[1]] * (len(batch) - 1)]))
    found = run_with(lens, padded, batch_size=1)
    assert found.token_loss[0].isnan().tolist() == [False] * 4 + [True] * (batch.shape[1] - 5)
    torch.testing.assert_close(found.token_loss.nanmean(1), found.loss)
