"""What a training can be asked: sizes, the file, settings, and every refusal."""

import json
from dataclasses import FrozenInstanceError, asdict

import pytest

from sink_lens.errors import InputError
from sink_lens.training.config import (
    EXAMPLE,
    SIZES,
    TrainConfig,
    build_train_config,
    read_train_config,
)
from sink_lens.training.passes import count_parameters


@pytest.mark.parametrize(
    ("size", "millions"), [("toy", 3.4), ("small", 10.0), ("medium", 40.5), ("paper", 151.9)]
)
def test_a_size_has_about_as_many_parameters_as_it_says(size, millions):
    assert count_parameters(TrainConfig(size=size))[0] / 1e6 == pytest.approx(millions, abs=0.1)


def test_the_papers_size_is_its_tables_3_and_4():
    config = TrainConfig(size="paper")
    assert (config.d_model, config.d_mlp, config.n_layers, config.n_heads, config.n_kv_heads) == (
        768,
        3072,
        12,
        12,
        12,
    )
    assert (config.vocab_size, config.rms_eps, config.rope_theta, config.tied) == (
        50304,
        1e-6,
        1e4,
        True,
    )
    assert (config.betas, config.weight_decay, config.clip) == ((0.9, 0.95), 0.1, 1.0)
    assert (config.lr, config.min_lr, config.warmup, config.steps) == (1e-3, 1e-4, 2000, 40_000)
    assert (config.length, config.dtype, config.init_std) == (4096, "bfloat16", 0.02)
    assert (config.batch // config.accumulation, config.accumulation) == (
        12,
        5,
    )  # the authors' README


def test_every_size_sets_the_same_fields_and_each_can_be_replaced():
    assert len({frozenset(fields) for fields in SIZES.values()}) == 1
    config = TrainConfig(size="paper", n_layers=3, lr=5e-4, dtype="float32")
    assert (config.n_layers, config.lr, config.dtype, config.d_model) == (3, 5e-4, "float32", 768)


def test_other_heads_of_a_configuration_have_as_many_keys_unless_it_shares_them():
    assert read_train_config(TrainConfig(), n_heads=12).n_kv_heads == 12
    assert read_train_config(TrainConfig(n_kv_heads=2), n_heads=12).n_kv_heads == 2
    assert read_train_config(TrainConfig(), n_heads=12, n_kv_heads=3).n_kv_heads == 3


def test_a_configuration_is_whole_frozen_and_can_be_written_and_read_back():
    config = TrainConfig(checkpoints=(3, 5), n_kv_heads=2)
    assert (
        None
        not in {name: value for name, value in asdict(config).items() if name != "device"}.values()
    )
    assert build_train_config(json.loads(json.dumps(asdict(config)))) == config
    with pytest.raises(FrozenInstanceError):
        config.lr = 1.0


@pytest.mark.parametrize(
    ("steps", "more", "kept"),
    [
        (1, (), (0, 1)),
        (8, (), (0, 1, 2, 4, 8)),
        (10, (), (0, 1, 2, 4, 8, 10)),
        (10, (7, 4), (0, 1, 2, 4, 7, 8, 10)),
    ],
)
def test_kept_are_zero_the_powers_of_two_and_the_end(steps, more, kept):
    assert TrainConfig(steps=steps, warmup=0, checkpoints=more).kept_steps == kept


def test_the_example_is_a_file_to_begin_with(tmp_path):
    (tmp_path / "train.toml").write_text(EXAMPLE)
    assert read_train_config(tmp_path / "train.toml") == TrainConfig()
    changed = read_train_config(tmp_path / "train.toml", seed=3, size="small", steps=9, warmup=1)
    assert (changed.seed, changed.d_model, changed.steps, changed.batch) == (3, 320, 9, 32)
    assert [name for name in asdict(TrainConfig()) if name not in EXAMPLE] == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("colour = 1", "has 'colour', which is not known; "),
        ("size = [", "cannot be read as a training"),
        ('size = "huge"', "size is 'huge'; need one of toy, small, medium, paper"),
        ("lr = nan", "lr is nan; need a number"),
        ("lr = 0", "lr is 0.0; need a number above 0"),
        ("steps = true", "steps is True; need a whole number"),
        ('data = " "', "data is empty"),
        ("n_layers = 0", "n_layers is 0; need at least 1"),
        ("seed = -1", "seed is -1; need a whole number from 0 on"),
        ("n_heads = 7", "d_model is 192 and n_heads 7; need heads of an equal, even width"),
        ("n_kv_heads = 4", "n_heads is 6 and n_kv_heads 4; need a multiple of n_kv_heads"),
        ("accumulation = 5", "batch is 32 and accumulation 5; need a multiple of accumulation"),
        ("min_lr = 1.0", "min_lr is 1.0 and lr 0.002; need a min_lr of at most lr"),
        ("steps = 60\nwarmup = 60", "warmup is 60 and steps 60; need fewer steps of warm-up"),
        ("eval_frac = 1", "eval_frac is 1.0; need a number above 0, up to 0.5"),
        ("watch = true\nlength = 9", "watch is asked for with sequences of 9 tokens"),
        ("betas = [0.9]", "betas is (0.9,); need two numbers"),
        ("checkpoints = [700]", "checkpoints has [700]; need steps from 0 to 600"),
        ('device = "tpu"', "device is 'tpu'; need one of cpu, cuda, mps"),
        ('optimizer = "muon"\nfsdp = true', "fsdp is asked for with the optimizer muon"),
        ('device = "cpu"\nfsdp = true', "fsdp is asked for on cpu; need GPUs"),
    ],
)
def test_what_cannot_be_run_is_refused_with_what_is_needed(tmp_path, text, says):
    (tmp_path / "train.toml").write_text(text)
    with pytest.raises(InputError) as refused:
        read_train_config(tmp_path / "train.toml")
    assert says in str(refused.value)
