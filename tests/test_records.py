"""Run folders: written whole or not at all, locked, continued, compared by name."""

import contextlib
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sink_lens.errors import RunError
from sink_lens.records import RUN_FILE, RunLog, add_to_run, create_run, read_run
from sink_lens.records.shards import remove_shards, run_progress, shard_progress
from sink_lens.records.writing import part_path

CONFIG = {"sequences": 32, "threshold": 0.3}
PROVENANCE = {
    "model": "toy", "weights_sha256": "aa", "tokens_sha256": "bb", "token_source": "text:toy", "bos_condition": "auto",
    "dtype": "float32", "device": "cpu", "kernel": "sdpa", "versions": {"torch": "2"},
}  # fmt: skip
HEADS = pd.DataFrame({"layer": [0, 1], "sink_rate": [0.25, float("nan")], "label": ["no-op", None]})


def start(folder, **changes):
    options = {
        "kind": "trace",
        "config": CONFIG,
        "provenance": PROVENANCE,
        "expects": ("heads", "neurons"),
    }
    return create_run(folder, **(options | changes))


def finished(folder, **changes):
    with start(folder, provenance=PROVENANCE | changes) as writer:
        writer.write_table("heads", HEADS)
    return read_run(folder)


def interrupted(folder):
    with pytest.raises(KeyboardInterrupt), start(folder) as writer:
        writer.write_table("heads", HEADS)
        raise KeyboardInterrupt
    return read_run(folder)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_was_written_is_read(tmp_path):
    with start(tmp_path / "deep" / "run") as writer:
        writer.write_table("heads", HEADS)
        writer.write_csv("summary", pd.DataFrame({"quantity": ["a"], "value": [1.5]}))
        writer.write_tensors("patterns", {"pattern": np.arange(6, dtype=np.uint8).reshape(2, 3).T})
        writer.write_text("report.html", "<p>é</p>")
    run = read_run(tmp_path / "deep" / "run")
    pd.testing.assert_frame_equal(run.tables["heads"], HEADS)
    assert run.tables["summary"]["value"].tolist() == [1.5]
    assert set(run.tables) == {"heads", "summary"}
    assert run.tensors("patterns")["pattern"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert (run.folder / "report.html").read_text(encoding="utf-8") == "<p>é</p>"
    assert (run.status, run.kind, run.config, run.provenance) == (
        "finished",
        "trace",
        CONFIG,
        PROVENANCE,
    )
    assert run.missing == ["neurons"]
    assert names(run.folder) == [
        "heads.parquet",
        "patterns.safetensors",
        "report.html",
        RUN_FILE,
        "summary.csv",
    ]


def test_run_json_is_strict_json_and_says_running_at_once(tmp_path):
    config = {
        "ratio": float("nan"),
        "top": (np.float32(0.5), np.int64(3)),
        "out": Path("there"),
        "inf": np.inf,
    }
    with start(tmp_path, config=config) as writer:
        text = (tmp_path / RUN_FILE).read_text()
        assert "NaN" not in text
        assert json.loads(text)["status"] == "running"
        assert json.loads(text)["config"] == {
            "ratio": None,
            "top": [0.5, 3],
            "out": "there",
            "inf": None,
        }
        writer.write_table("heads", HEADS)


def test_what_json_cannot_hold_is_refused_before_anything_is_made(tmp_path):
    with pytest.raises(RunError, match="of type object"):
        start(tmp_path / "run", config={"model": object()})
    assert names(tmp_path) == []


def test_a_folder_in_use_by_another_process_is_refused(tmp_path):
    code = (
        "import sys; from sink_lens.records import create_run\n"
        "run = create_run(sys.argv[1], kind='trace', config={}, provenance={})\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(RunError, match="in use"):
            start(tmp_path)
        other.kill()
    # A killed process holds nothing, and leaves a run that an equal one continues.
    with start(tmp_path, config={}, provenance={}) as writer:
        writer.write_table("heads", HEADS)
    assert read_run(tmp_path).status == "finished"


def test_a_finished_run_is_kept_unless_overwriting_is_asked_for(tmp_path):
    finished(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match=r"a finished run .*overwrite=True"):
        start(tmp_path)
    with start(tmp_path, overwrite=True) as writer:
        assert not writer.has("heads")
        writer.write_table("neurons", HEADS)
    assert names(tmp_path) == ["neurons.parquet", "notes.txt", RUN_FILE]


def test_a_run_is_replaced_only_by_the_first_file_of_the_new_one(tmp_path):
    finished(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with (
        pytest.raises(ValueError, match="no such layer"),
        start(tmp_path, config={"layer": 99}, overwrite=True),
    ):
        raise ValueError("no such layer")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    code = (
        "import os, signal, sys; from sink_lens.records import create_run\n"
        "create_run(sys.argv[1], kind='trace', config={}, provenance={}, overwrite=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    with pytest.raises(RunError, match="a finished run"):
        start(tmp_path)
    assert {
        path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != ".lock"
    } == before


def test_a_finished_run_is_gone_on_with_where_it_can_be_added_to(tmp_path):
    before = finished(tmp_path)
    record = (tmp_path / RUN_FILE).read_text()
    with pytest.raises(RunError, match="no such device"), start(tmp_path, reopen=True):
        raise RunError("no such device")
    assert (tmp_path / RUN_FILE).read_text() == record  # a refusal leaves it
    with pytest.raises(KeyboardInterrupt), start(tmp_path, reopen=True):
        raise KeyboardInterrupt
    stopped = read_run(tmp_path)
    assert stopped.status == "interrupted"
    pd.testing.assert_frame_equal(stopped.tables["heads"], HEADS)
    with start(tmp_path, reopen=True) as writer:
        assert writer.has("heads")
        assert read_run(tmp_path).status == "running"
        writer.write_table("neurons", HEADS)
    again = read_run(tmp_path)
    assert (again.status, again.started, set(again.tables)) == (
        "finished",
        before.started,
        {"heads", "neurons"},
    )


def test_a_run_that_is_cleared_holds_none_of_its_files_and_leaves_those_of_others(tmp_path):
    finished(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    with start(tmp_path, reopen=True) as writer:
        writer.clear()
        assert not writer.has("heads")
        assert names(tmp_path) == [".lock", "notes.txt", RUN_FILE]
        writer.write_table("neurons", HEADS)
    assert set(read_run(tmp_path).tables) == {"neurons"}


def contents(folder):
    """Every file and link under a folder, by path: what it holds, or where it leads."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        found[name] = (
            f"-> {path.readlink()}"
            if path.is_symlink()
            else path.read_bytes()
            if path.is_file()
            else None
        )
    return found


@pytest.mark.parametrize(
    "name", [".replaced", "heads.parquet.part", ".run.json.sink_lens", "neurons.parquet", ".lock"]
)
@pytest.mark.parametrize("to", ["docs", "docs/thesis.tex"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_link_in_a_run_folder_leads_nothing_of_the_user_into_it(tmp_path, name, to, overwrite):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "thesis.tex").write_text("years")
    before = contents(tmp_path / "docs")
    interrupted(tmp_path / "run")
    (tmp_path / "run" / name).symlink_to(tmp_path / to)
    with contextlib.suppress(RunError), start(tmp_path / "run", overwrite=overwrite) as writer:
        writer.write_table("neurons", HEADS)
    assert contents(tmp_path / "docs") == before
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / name).symlink_to(tmp_path / to)
    with contextlib.suppress(RunError), start(tmp_path / "only", overwrite=overwrite) as writer:
        writer.write_table("neurons", HEADS)
    assert contents(tmp_path / "docs") == before


@pytest.mark.parametrize(
    "name",
    [
        "draft.part",
        "run.json.part",
        ".replaced/a.txt",
        "report.html",
        "neurons.parquet",
        "neurons.csv",
        "log.jsonl",
    ],
)
@pytest.mark.parametrize("how", ["goes on", "overwrites", "fails"])
def test_a_file_of_the_user_in_a_run_folder_stays_as_it_is(tmp_path, name, how):
    interrupted(tmp_path)
    mine = tmp_path / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    with (
        contextlib.suppress(RunError, ValueError),
        start(tmp_path, overwrite=how == "overwrites") as writer,
    ):
        if how == "fails":
            raise ValueError
        writer.write_table("neurons", HEADS)
        RunLog(tmp_path, columns={"monitor": {"step": "int64"}}).close()
    assert mine.read_text() == "mine"
    assert (
        read_run(tmp_path)
        .tables["heads" if "heads" in read_run(tmp_path).tables else "neurons"]
        .equals(HEADS)
    )


def test_a_file_that_a_record_lists_and_the_run_did_not_write_is_not_deleted(tmp_path):
    finished(tmp_path)
    (tmp_path / "thesis.tex").write_text("years")
    record = json.loads((tmp_path / RUN_FILE).read_text())
    for own in (
        {"files": record["files"] | {"thesis.tex": {"bytes": 5, "sha256": "a"}}},
        {"written": ["thesis.tex"]},
    ):
        (tmp_path / RUN_FILE).write_text(json.dumps(record | own | {"status": "failed"}))
        for overwrite in (False, True):
            with start(tmp_path, overwrite=overwrite, reopen=True) as writer:
                writer.write_table("neurons", HEADS)
                writer.clear()
            assert (tmp_path / "thesis.tex").read_text() == "years"


def test_a_run_killed_between_its_record_and_the_name_of_a_file_has_the_file(tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path; import pandas as pd\n"
        "from sink_lens.records import create_run\n"
        "writer = create_run(sys.argv[1], kind='trace', config={}, provenance={})\n"
        "writer.write_table('heads', pd.DataFrame({'layer': [0]}))\n"
        "Path.replace = lambda one, to, real=Path.replace: (\n"
        "    os.kill(os.getpid(), signal.SIGKILL) if to.name == 'heads.parquet' else real(one, to))\n"
        "writer.write_table('heads', pd.DataFrame({'layer': [1]}))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    with create_run(tmp_path, kind="trace", config={}, provenance={}) as writer:
        assert writer.read("heads")["layer"].tolist() == [1]
    assert names(tmp_path) == ["heads.parquet", RUN_FILE]


def test_the_shards_of_a_merged_run_go_and_what_else_lies_in_them_stays(tmp_path):
    finished(tmp_path / "run")
    for number in (1, 2):
        finished(tmp_path / "run" / f"shard-{number}-of-3")
    finished(tmp_path / "elsewhere")
    (tmp_path / "run" / "shard-3-of-3").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "run" / "shard-2-of-3" / "notes.txt").write_text("mine")
    remove_shards(tmp_path / "run")
    assert names(tmp_path / "run") == ["heads.parquet", RUN_FILE, "shard-2-of-3", "shard-3-of-3"]
    assert names(tmp_path / "run" / "shard-2-of-3") == ["notes.txt"]
    assert names(tmp_path / "elsewhere") == ["heads.parquet", RUN_FILE]


def test_what_is_no_run_in_the_place_of_the_folder_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years")
    with pytest.raises(RunError, match=r"thesis\.tex"):
        start(tmp_path, overwrite=True)
    assert names(tmp_path) == ["thesis.tex"]
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"file cannot be written \(File exists\)"):
        start(tmp_path / "file")


def test_an_unfinished_run_says_how_many_of_its_parts_are_done(tmp_path):
    parts = [f"block-{number}" for number in range(5)]
    with contextlib.suppress(KeyboardInterrupt), start(tmp_path) as writer:
        writer.list_parts(parts)
        for name in parts[:3]:
            writer.write_table(name, HEADS)
        raise KeyboardInterrupt
    none = shard_progress(tmp_path)
    assert run_progress(tmp_path, none) == "interrupted, 3 of 5 blocks done"
    with start(tmp_path) as writer:
        writer.list_parts(parts)
    assert run_progress(tmp_path, none) == "finished"


def test_an_interrupted_run_keeps_its_tables_and_is_continued(tmp_path):
    run = interrupted(tmp_path)
    assert (run.status, run.missing, run.error) == ("interrupted", ["neurons"], None)
    with start(tmp_path) as writer:
        assert writer.has("heads")
        assert writer.has("heads.parquet")
        assert not writer.has("neurons")
        writer.write_table("neurons", HEADS)
    again = read_run(tmp_path)
    assert (again.status, again.missing, again.started) == ("finished", [], run.started)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"config": CONFIG | {"sequences": 8}}, "sequences: 32 there, 8 here"),
        ({"kind": "sweep"}, "kind: trace there, sweep here"),
        ({"provenance": PROVENANCE | {"tokens_sha256": "cc"}}, "tokens_sha256: bb there, cc here"),
        ({"provenance": PROVENANCE | {"versions": {"torch": "3"}}}, "versions"),
    ],
)
def test_a_run_is_not_gone_on_with_by_another(tmp_path, changes, text):
    for folder, made, options in (("whole", finished, {"reopen": True}), ("part", interrupted, {})):
        made(tmp_path / folder)
        record = (tmp_path / folder / RUN_FILE).read_text()
        with pytest.raises(RunError, match=text):
            start(tmp_path / folder, **options, **changes)
        assert (tmp_path / folder / RUN_FILE).read_text() == record


def test_a_damaged_table_of_an_interrupted_run_is_made_again(tmp_path):
    interrupted(tmp_path)
    (tmp_path / "heads.parquet").write_bytes(b"PAR1")
    with start(tmp_path) as writer:
        assert not writer.has("heads")
        writer.write_table("heads", HEADS)


def test_a_table_is_made_once_however_often_the_run_is_started(tmp_path):
    made = []

    def make():
        made.append(1)
        return HEADS

    with pytest.raises(KeyboardInterrupt), start(tmp_path / "run") as writer:
        assert writer.read_or_make("heads", make) is HEADS
        raise KeyboardInterrupt
    with start(tmp_path / "run") as writer:
        pd.testing.assert_frame_equal(writer.read_or_make("heads", make), HEADS)
        with pytest.raises(RunError, match="it lacks head"):
            writer.read("heads", columns=("layer", "head"))
    assert made == [1]


def test_a_failed_run_says_what_failed(tmp_path):
    with pytest.raises(ValueError, match="no sink"), start(tmp_path) as writer:
        writer.write_table("heads", HEADS)
        raise ValueError("no sink")
    run = read_run(tmp_path)
    assert (run.status, run.error) == ("failed", "ValueError: no sink")


def test_an_error_before_the_first_table_leaves_nothing_behind_but_a_folder_of_the_user(tmp_path):
    (tmp_path / "mine").mkdir()
    for folder in (tmp_path / "mine", tmp_path / "deep" / "run"):
        with pytest.raises(ValueError, match="unknown model"), start(folder):
            raise ValueError("unknown model")
    assert names(tmp_path) == ["mine"]
    assert names(tmp_path / "mine") == []


def test_a_full_disk_names_what_is_complete_and_leaves_no_part(tmp_path, monkeypatch):
    written = []

    def fsync(_):
        written.append(1)
        if len(written) > 3:  # run.json at the start, heads.parquet, run.json
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(RunError) as caught, start(tmp_path) as writer:
        writer.write_table("heads", HEADS)
        writer.write_table("neurons", HEADS)
    assert "the disk is full" in str(caught.value)
    assert "bytes" in str(caught.value)
    assert "Complete in this run: heads.parquet" in str(caught.value)
    assert "still says 'running'" in caught.value.__notes__[0]
    assert names(tmp_path) == ["heads.parquet", RUN_FILE]
    monkeypatch.undo()
    with start(tmp_path) as writer:
        assert writer.has("heads")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"kind": ', "Expecting value"),
        ("[]", "it holds no table"),
        ('{"kind": "trace"}', "it lacks config"),
        ('{"kind":' + "[" * 100_000, "is damaged"),
    ],
)
def test_a_damaged_run_json_is_named(tmp_path, text, says):
    (tmp_path / RUN_FILE).write_text(text)
    with pytest.raises(RunError, match=rf"run\.json cannot be read.*{says}"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda record: record["files"].update({"..": record["files"]["heads.parquet"]}),
            "lists '..', which",
        ),
        (
            lambda record: record["files"].update({"": record["files"]["heads.parquet"]}),
            "lists '', which",
        ),
        (
            lambda record: record["files"].update({"../a.b": record["files"]["heads.parquet"]}),
            "lists '../a.b', which",
        ),
        (
            lambda record: record["files"].update({"heads.parquet": {"bytes": "9", "sha256": "a"}}),
            "no size and hash",
        ),
        (lambda record: record.update({"expects": [["heads"]]}), "expects should be names"),
        (lambda record: record.update({"provenance": []}), r"provenance is \[\]; need dict"),
    ],
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_json_of_the_wrong_shape_is_refused_and_nothing_is_deleted(
    tmp_path, change, says, overwrite
):
    finished(tmp_path)
    record = json.loads((tmp_path / RUN_FILE).read_text())
    change(record)
    (tmp_path / RUN_FILE).write_text(json.dumps(record))
    before = names(tmp_path)
    with pytest.raises(RunError, match=says):
        read_run(tmp_path)
    with pytest.raises(RunError, match=says):
        start(tmp_path, overwrite=overwrite)
    assert names(tmp_path) == before


def test_an_interrupt_says_where_the_finished_part_is(tmp_path):
    with pytest.raises(KeyboardInterrupt) as nothing, start(tmp_path / "nothing"):
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt) as some, start(tmp_path / "some") as writer:
        writer.write_table("heads", HEADS)
        raise KeyboardInterrupt
    with (
        pytest.raises(KeyboardInterrupt) as added,
        add_to_run(finished(tmp_path / "old").folder) as writer,
    ):
        writer.write_table("more", HEADS)
        raise KeyboardInterrupt
    assert "what is finished is in" in added.value.__notes__[0]
    assert not hasattr(nothing.value, "__notes__")
    (note,) = some.value.__notes__
    assert f"out='{tmp_path / 'some'}'" in note


def test_a_run_killed_before_a_listed_file_had_its_name_is_completed_when_something_is_added(
    tmp_path,
):
    finished(tmp_path)
    path = tmp_path / "heads.parquet"
    path.rename(part_path(path))
    path.write_bytes(b"what was there before")
    with add_to_run(tmp_path):
        pd.testing.assert_frame_equal(read_run(tmp_path).tables["heads"], HEADS)
    assert not part_path(path).exists()


def test_a_damaged_table_and_what_is_not_there_are_named_when_they_are_read(tmp_path):
    run = finished(tmp_path)
    whole = (tmp_path / "heads.parquet").read_bytes()
    (tmp_path / "heads.parquet").write_bytes(whole[:20] + bytes([whole[20] ^ 1]) + whole[21:])
    with pytest.raises(RunError, match=r"heads\.parquet cannot be read"):
        run.tables["heads"]
    with pytest.raises(RunError, match=r"patterns\.safetensors"):
        run.tensors("patterns")
    with pytest.raises(RunError, match=r"has no run\.json"):
        read_run(tmp_path / "nothing")


def test_a_log_that_another_goes_on_with_writes_no_more(tmp_path, monkeypatch):
    """What could not be written before is not written behind the other's rows."""
    first = RunLog(tmp_path, columns={"t": {"x": "int64"}})
    with monkeypatch.context() as full:
        full.setattr(
            os, "write", lambda *given: (_ for _ in ()).throw(OSError(errno.ENOSPC, "no space"))
        )
        with pytest.raises(OSError, match="no space"):
            first.append(1, {"t": [{"x": 1}]})
    second = RunLog(tmp_path, columns={"t": {"x": "int64"}})
    second.append(2, {"t": [{"x": 2}]})
    before = first.path.read_bytes()
    first.flush()
    assert first.path.read_bytes() == before
    second.close()
