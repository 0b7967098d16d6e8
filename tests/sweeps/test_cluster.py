"""The same table from a Ray cluster as from this process, also where workers die, and what it refuses."""

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import threading
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import own_attention
import pandas as pd
import psutil
import pytest
import torch
from rounding import CLOSE, NEAR_ZERO

from sink_lens import load
from sink_lens.data.tokens import random_tokens
from sink_lens.edits.constructors import zero
from sink_lens.edits.evaluation import on_outcome
from sink_lens.engine import engine
from sink_lens.engine import plan as planning
from sink_lens.errors import InputError, ModelError
from sink_lens.models.load import wrap
from sink_lens.records.writing import RunWriter
from sink_lens.report import style
from sink_lens.sweeps import EditGrid, Grid, MetricSpec, cell_of, cluster
from sink_lens.sweeps.sweep import sweep
from tests.tiny_families import tiny

runner = import_module("sink_lens.sweeps.sweep")

GRID = Grid.of(EditGrid(site="z", layers=1), controls=0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "model"
    tiny("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def lens(saved):
    return load(saved, device="cpu")


@pytest.fixture(scope="module", autouse=True)
def small_blocks():
    """Blocks of four cells, so that the sweep has many; made here and sent to the workers."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine, "CELLS_A_BLOCK", 1)
        patched.setattr(planning, "_CPU_TOKENS", 128)
        patched.setattr(style, "figure_bytes", lambda figure, form: b"a picture")
        yield


def sequences():
    generator = torch.Generator().manual_seed(0)
    return random_tokens(None, sequences=3, length=10, generator=generator, vocab_size=300)


def swept(lens, out, *, what=GRID, **options):
    return sweep(lens, what, tokens=sequences(), out=out, progress=False, **options)


@pytest.fixture
def jobs(monkeypatch):
    """List what is sent to Ray; without Ray, a worker in this process computes the blocks."""
    sent = []

    def run_here(job, blocks, **how):
        worker = cluster.Worker(job, "cpu")
        for block in blocks:
            yield block, worker.run(block)
        sent.append((job, blocks))

    monkeypatch.setattr(runner, "run_on_ray", run_here)
    monkeypatch.setattr(runner, "check_engine", lambda engine, **how: None)
    return sent


def test_a_worker_has_the_sweep_s_model_or_is_refused_by_what_differs(
    saved, lens, tmp_path, jobs, monkeypatch
):
    pd.testing.assert_frame_equal(
        swept(lens, tmp_path / "ray", engine="ray").frame, swept(lens, tmp_path / "here").frame
    )
    ((job, blocks),) = jobs
    other = {"weights_sha256": "another"}
    changed = shutil.copytree(saved, tmp_path / "changed")
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    for one, what in (
        (replace(job, provenance=job.provenance | other), "weights"),
        (replace(job, model=str(changed)), "configuration"),
        (replace(job, baseline=[one + 1e-3 for one in job.baseline]), "metrics of the baseline"),
    ):
        with pytest.raises(ModelError, match=f"has other {what}.* on a worker.*save_pretrained"):
            cluster.Worker(one, "cpu").run(blocks[0])


def test_an_attention_function_that_a_worker_lacks_is_refused(saved, tmp_path, jobs):
    model = tiny("llama")
    with own_attention.use(model, "softmax1"):
        lens = replace(wrap(model), name=str(saved))
        with pytest.raises(ModelError, match="other metrics of the baseline run on a worker"):
            swept(lens, tmp_path / "run", engine="ray")


def test_what_the_engine_would_not_heed_is_refused_and_without_ray_it_says_how_to_install_it(
    lens, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    with pytest.raises(
        InputError, match="engine 'local' with workers 2; need engine 'ray', or leave workers out"
    ):
        swept(lens, tmp_path / "run", workers=2)
    with pytest.raises(InputError, match="workers is 0; need at least 1"):
        swept(lens, tmp_path / "run", engine="ray", workers=0)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        InputError, match=r"engine 'ray' needs Ray; install it with pip install 'sink-lens\[ray\]'"
    ):
        swept(lens, tmp_path / "run", engine="ray")
    assert not (tmp_path / "run").exists()


def test_a_cluster_that_does_not_answer_is_said_at_once_and_nothing_is_written(
    lens, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    with socket.socket() as held:  # bound and not listening: whoever connects is refused
        held.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"ray://127.0.0.1:{held.getsockname()[1]}")
        with pytest.raises(
            InputError,
            match=r"no Ray cluster answers at RAY_ADDRESS=ray://127.* \(.*refused.*\); need a",
        ):
            swept(lens, tmp_path / "run", engine="ray")
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def two_workers():
    """Ray on this machine, on loopback, for the tests of this file; its processes are gone afterwards."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'sink-lens[ray]'")
    before = set(psutil.Process().children(recursive=True))
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_AUTH_MODE", "disabled")  # else a token is written into the home folder
        patched.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patched.setenv(
            "RAY_worker_niceness", "0"
        )  # 15 else, and beside other tests they would hardly run
        patched.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        ray.init(
            num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
            _node_ip_address="127.0.0.1",
        )  # fmt: skip
        yield ray
        ray.shutdown()
    left = [child for child in psutil.Process().children(recursive=True) if child not in before]
    for child in psutil.wait_procs(left, timeout=10)[1]:
        child.kill()


def actors():
    """The processes of Ray's workers that hold a model."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            found += [child.pid] * ("ray::Worker" in " ".join(child.cmdline()))
    return found


@pytest.mark.exhaustive
def test_a_ray_cluster_whose_workers_are_killed_gives_the_table_of_one_process(
    lens, tmp_path, monkeypatch, two_workers
):
    twice = on_outcome(lambda run: 2 * run.loss, name="twice")
    cells = [
        cell_of(zero("neurons", layers=[layer], units=[unit]), name=f"unit {unit} of layer {layer}")
        for layer in range(3)
        for unit in range(30)
    ]
    given = {"what": cells, "metrics": [MetricSpec(name="sink_mass"), twice]}
    here = swept(lens, tmp_path / "here", **given)
    blocks = sorted(path.stem for path in here.folder.glob("block-*"))
    written, killed, at_the_end, write = [], [], [], RunWriter.write_table

    def watched(self, name, frame):
        if name.startswith("block-"):
            written.append(name)
            if len(written) == 2:
                killed.extend(
                    actors()
                )  # whoever has a block: one at least, and another that has begun
                for worker in killed:
                    os.kill(worker, signal.SIGKILL)
            if len(written) == len(blocks):
                at_the_end.extend(actors())
        return write(self, name, frame)

    monkeypatch.setattr(
        engine.Engine, "run", lambda *args, **options: pytest.fail("this process computed a block")
    )
    monkeypatch.setattr(RunWriter, "write_table", watched)
    result = swept(lens, tmp_path / "run", engine="ray", workers=2, **given)
    for name, table in here.tables.items():
        pd.testing.assert_frame_equal(
            pd.read_parquet(result.folder / f"{name}.parquet"), table, rtol=CLOSE, atol=NEAR_ZERO
        )
    assert result.headline == here.headline
    assert sorted(written) == blocks
    assert killed
    assert not set(killed) & set(at_the_end)
    assert at_the_end  # processes that were started in their place, or had not begun
    assert two_workers.is_initialized()  # a cluster that was there before stays


@pytest.mark.exhaustive
def test_what_cannot_be_sent_to_ray_is_refused(lens, tmp_path, two_workers):
    lock = threading.Lock()

    def guarded(run):
        with lock:
            return run.loss

    with pytest.raises(
        InputError,
        match="a cell or a metric holds something that cannot be sent to another process",
    ):
        swept(lens, tmp_path / "run", metrics=[on_outcome(guarded)], engine="ray", workers=1)
