"""What is measured: names, checkpoints and untrained models, each once; and the sequences."""

import subprocess
import sys

import pytest
import torch

from sink_lens.errors import InputError
from sink_lens.identity.models_to_measure import CHUNK, RandomSequences, models_to_measure
from sink_lens.identity.untrained_models import UntrainedConfig, untrained
from sink_lens.models.load import load
from sink_lens.models.tiny import tiny_tokenizer
from tests.tiny_families import tiny

from ..training.runs import write_run

CONFIG = UntrainedConfig(n_layers=1, d_model=16, n_heads=2, vocab_size=50, n_context=32)


def test_a_training_is_its_checkpoints_in_order(tmp_path):
    folder = write_run(tmp_path / "mine", [3.0, 2.0], seed=4)
    for step in (20, 0, 5):
        (folder / "checkpoints" / f"checkpoint-{step}").mkdir(parents=True)
    found = models_to_measure([str(folder)])
    assert [one.name for one in found] == ["mine step 0", "mine step 5", "mine step 20"]
    assert {(one.variant, one.seed) for one in found} == {("mine", 4)}
    assert found[0].source == str(folder / "checkpoints" / "checkpoint-0")


def test_untrained_models_are_repeated_over_seeds():
    found = models_to_measure(configs=[CONFIG], seeds=(0, 3))
    assert [(one.variant, one.seed) for one in found] == [(CONFIG.label, 0), (CONFIG.label, 3)]
    opened, own = found[1].open(device="cpu"), untrained(CONFIG, seed=3)
    assert torch.equal(*(one.plain.get_input_embeddings().weight for one in (opened, own)))
    with pytest.raises(InputError, match="untrained models are float32"):
        found[0].open(dtype="float16")


def test_nothing_and_something_twice_are_refused(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="nothing to measure"):
        models_to_measure()
    (tmp_path / "one").mkdir()
    (tmp_path / "sub" / "one").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"is there twice; need each model once"):
        models_to_measure(["one", str(tmp_path / "one")])
    with pytest.raises(InputError, match="is there twice"):
        models_to_measure(configs=[CONFIG, CONFIG])
    assert len(models_to_measure(["one", "sub/one"])) == 2


def test_any_chunk_can_be_drawn_alone():
    lens, draws = untrained(CONFIG, seed=0), RandomSequences(sequences=150, length=8, seed=1)
    chunks = list(draws.chunks(lens))
    assert [one.n_sequences for one in chunks] == [CHUNK, CHUNK, 150 - 2 * CHUNK]
    assert torch.equal(chunks[2].tokens, draws.chunk(lens, 2).tokens)
    assert not torch.equal(chunks[0].tokens, chunks[1].tokens)
    other = RandomSequences(sequences=150, length=8, seed=2)
    assert not torch.equal(other.chunk(lens, 0).tokens, chunks[0].tokens)


def test_ordinary_tokens_are_drawn_with_bos_where_it_is_asked_for():
    lens = load(tiny("llama"), tokenizer=tiny_tokenizer())
    plain = RandomSequences(sequences=64, length=32, seed=0).chunk(lens, 0).tokens
    assert int(plain.min()) > 2  # no pad, BOS or EOS
    assert (
        RandomSequences(sequences=64, length=32, seed=0, bos="with").chunk(lens, 0).tokens[:, 0]
        == 1
    ).all()


@pytest.mark.parametrize(
    ("command", "said"),
    [("preference", "nothing to measure"), ("fingerprint", "no model was given")],
)
def test_without_a_model_the_command_refuses_before_torch_is_loaded(command, said):
    code = (
        f"import sys\nfrom sink_lens.cli import main\nsys.argv = ['sink-lens', '{command}']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "2 False\n"
    assert said in done.stderr
