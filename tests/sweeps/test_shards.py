"""A sweep in shards: the division, refusals, and the same tables as in one process."""

import pandas as pd
import pytest
import torch
from filelock import FileLock, Timeout
from lenses import lens_of

from sink_lens.data.tokens import TokenBatch
from sink_lens.engine.engine import Engine
from sink_lens.errors import InputError, RunError
from sink_lens.records import run_state, shards
from sink_lens.records.shards import Shard, shard_progress
from sink_lens.sweeps import EditGrid, Grid, sweep


@pytest.fixture
def asked():
    """What one sweep of a tiny Llama is asked, cells and tokens; some blocks for each of three shards."""
    grid = Grid.of(EditGrid(units="each"), EditGrid(site="z", heads="each"), controls=2, seed=1)
    tokens = TokenBatch.from_tensor(
        torch.randint(3, 300, (2, 8), generator=torch.Generator().manual_seed(0))
    )
    return {"model": lens_of("llama"), "what": grid, "tokens": tokens, "progress": False}


def test_a_shard_is_named_or_is_the_task_of_an_array_job():
    assert Shard.parse("3/8") == Shard(3, 8)
    array = {
        "SLURM_ARRAY_TASK_MIN": "0",
        "SLURM_ARRAY_TASK_MAX": "7",
        "SLURM_ARRAY_TASK_COUNT": "8",
    }
    assert Shard.parse("slurm", array | {"SLURM_ARRAY_TASK_ID": "2"}) == Shard(3, 8)
    for text in ("0/8", "9/8", "3", "a/b"):
        with pytest.raises(InputError, match="need one such as 3/8"):
            Shard.parse(text)
    with pytest.raises(InputError, match="outside of an array job"):
        Shard.parse("slurm", {})
    some = {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_MIN": "3", "SLURM_ARRAY_TASK_COUNT": "2"}
    with pytest.raises(
        InputError, match=r"2 tasks between 3 and 5; need all of them \(sbatch --array=3-5\)"
    ):
        Shard.parse("slurm", some | {"SLURM_ARRAY_TASK_MAX": "5"})


def test_shards_divide_the_cells_and_the_last_one_makes_the_tables_of_one_process(
    asked, tmp_path, monkeypatch
):
    whole, ran = sweep(**asked, out=tmp_path / "whole"), list[int]()
    run = Engine.run

    def noted(self, block, **options):
        ran.extend(block.cells)
        return run(self, block, **options)

    monkeypatch.setattr(Engine, "run", noted)
    out = tmp_path / "run"
    for number in (2, 3):
        assert not sweep(**asked, out=out, shard=f"{number}/3").finished
        mine = sweep(**asked, out=out, shard=f"{number}/3")  # requeued
        assert not mine.finished
        with pytest.raises(RunError, match="has no table 'cells' yet; need all shards"):
            mine.top()
    shown = shard_progress(out)
    assert shown["state"].tolist() == ["not begun", "finished", "finished"]
    assert shown["done"].tolist()[1:] == shown["cells"].tolist()[1:]
    assert min(shown["done"][1:]) > 0
    last = sweep(**asked, out=out, shard="1/3")
    assert last.finished
    assert sorted(ran) == list(range(len(ran)))  # each cell once
    for name in ("frame", "controls", "values"):
        pd.testing.assert_frame_equal(
            getattr(last, name), getattr(whole, name), rtol=1e-5, atol=1e-6
        )
    assert not list(out.glob("shard-*"))
    assert run_state(out) == "finished"
    again = sweep(**asked, out=out, shard="2/3")
    assert again.finished
    pd.testing.assert_frame_equal(again.frame, last.frame)
    assert sorted(ran) == list(range(len(ran)))


def test_no_shard_is_opened_or_removed_while_another_shard_may_take_the_parts(
    asked, tmp_path, monkeypatch
):
    """A shard that waits for the run's folder, which is locked then, meets no folder that is half gone."""
    out, held = tmp_path / "run", []

    def is_held():
        try:
            FileLock(out / ".lock", timeout=0).acquire()
        except Timeout:
            return True
        return False

    opened, removed = shards.Shard.folder, shards.remove_shards
    monkeypatch.setattr(
        shards.Shard, "folder", lambda self, run: held.append(is_held()) or opened(self, run)
    )
    sweep(**asked, out=out, shard="1/2")
    assert held
    assert all(held)
    held.clear()
    monkeypatch.setattr(shards.Shard, "folder", opened)
    monkeypatch.setattr(shards, "remove_shards", lambda run: held.append(is_held()) or removed(run))
    assert sweep(**asked, out=out, shard="2/2").finished
    assert held == [True]
    # its parts are taken: a shard that ran beside it asks nothing of the folders any more
    monkeypatch.setattr(
        shards, "all_shards_finished", lambda run: pytest.fail("it read the shards' folders")
    )
    assert sweep(**asked, out=out, shard="1/2").finished


def test_the_sweep_itself_takes_what_shards_have_done_and_computes_the_rest(
    asked, tmp_path, monkeypatch
):
    out = tmp_path / "run"
    sweep(**asked, out=out, shard="2/3")
    done = {
        cell for path in out.glob("shard-2-of-3/block-*") for cell in pd.read_parquet(path)["cell"]
    }
    ran, run = set[int](), Engine.run
    monkeypatch.setattr(
        Engine,
        "run",
        lambda self, block, **how: (ran.update(block.cells), run(self, block, **how))[1],
    )
    sweep(**asked, out=out)
    assert done
    assert not done & ran
    assert done | ran == set(range(len(done | ran)))
    assert not list(out.glob("shard-*"))


def test_what_would_lose_or_repeat_work_is_refused(asked, tmp_path):
    out = tmp_path / "run"
    sweep(**asked, out=out, shard="2/3")
    with pytest.raises(RunError, match="holds shards of 3, and this is 1/4"):
        sweep(**asked, out=out, shard="1/4")
    with pytest.raises(RunError, match="metrics"):
        sweep(**asked, metrics=[lambda logits: logits[:, -1, 1]], out=out, shard="1/3")
    with (
        FileLock(out / "shard-2-of-3" / ".lock"),
        pytest.raises(RunError, match="in use by another process"),
    ):
        sweep(**asked, out=out, shard="2/3")
    assert shard_progress(out)["failed"].tolist() == [0, 0, 0]
