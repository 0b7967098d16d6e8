"""Bad values: texts for options, objects for arguments, and content for every kind of file."""

import io
import json
import pickle
import random
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

CANARY = "canary"
"""A file of this name in the working folder says that code ran."""
TEXTS = (
    *("", " ", "-1", "0", "1", "1.5", "1e9", "1000000000", "9" * 30, "-" + "9" * 30, "nan", "inf", "-inf", "1e400"),
    *("None", "true", "[]", "{}", "[1", "a=b=c", "=", "=1+1", "@SUM(A1)", "0-99999999999", "5-2", "1,,2", ",", "1e9,2"),
    *("..", "../..", "/", ".", "~", "/dev/null", "/dev/null/x", "/proc/self/status", "MODEL", "MODEL/config.json"),
    *("runs", "runs/sweep", "runs/sweep/run.json", "missing", "text.txt", "text.txt/x", "model.gguf", "x" * 300),
    *("x/" * 2500, "日本語", "a\u202egnp.exe", "\x1b[31mred", "new\nline", "tab\t", "\udcff", "\ufeff", "\u2028"),
    *("%s%n", "{0}", "${HOME}", f"$(touch {CANARY})", f"`touch {CANARY}`", f"; touch {CANARY}"),
    *(
        f"__import__('os').system('touch {CANARY}')",
        "http://127.0.0.1:9/x",
        "https://example.com/m",
        "file:///etc/passwd",
    ),
    *("owner/name", "hf://owner/name", "s3://bucket/x", "cuda:99", "meta", "mps", "float8", "torch.float32", "quick"),
)
NUMBERS = ("-1", "0", "1", "2", "3", "1000000", "1000000000", "9" * 19, "9" * 30, "-5", "1.5", "nan", "inf", "1e-300")


class Evil:
    """Pickled, it makes the canary when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (CANARY, "w")


PICKLE = pickle.dumps(Evil())
_BEYOND = ("..", "../../canary", "/etc/passwd", "", ".", "a/b", "a\\b", "con\x00", "\ud800", "x" * 5000)
_JSON: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        1.5,
        -0.0,
        10**30,
        -(10**30),
        1e308,
        float("nan"),
        float("inf"),
        "",
        " ",
        "0",
        "nan",
    ),
    *(
        [],
        {},
        [None],
        [[]],
        {"": None},
        {"a": {"b": []}},
        [1, "a", {}],
        *_BEYOND,
        "\u202e",
        "\x1b[2J",
        "<script>1</script>",
    ),
)


def bad_json(rng: random.Random) -> Any:
    """A JSON value that is unlikely to be the one that was needed."""
    return rng.choice(_JSON)


def _nodes(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    found = []
    pairs = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    for key, inner in pairs:
        found.append((value, key))
        found += _nodes(inner)
    return found


def change_json(text: str, rng: random.Random) -> str:
    """JSON of another shape: a value of another type, a key that is gone, added or renamed, or far too deep."""
    value = json.loads(text)
    if rng.random() < 0.15:
        return rng.choice(
            ["", "null", "[]", "{}", "3", '"a"', "[" * 5000, '{"a":' * 3000, text[: len(text) // 2], "\ufeff" + text]
        )
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        nodes = _nodes(value)
        if not nodes:
            break
        holder, key = rng.choice(nodes)
        how = rng.random()
        if how < 0.55:
            holder[key] = bad_json(rng)
        elif how < 0.75:
            del holder[key]
        elif isinstance(holder, dict):
            holder[rng.choice([*_BEYOND, "extra"])] = holder.pop(key)
        else:
            holder.append(bad_json(rng))
    found = json.dumps(value)
    if rng.random() < 0.1:
        found = found.replace(":", ":" + "[" * 2000, 1)
    return found


def change_bytes(content: bytes, rng: random.Random) -> bytes:
    """Bytes cut, flipped, filled, doubled or replaced."""
    if not content:
        return rng.randbytes(20)
    at = rng.randrange(len(content))
    how = rng.randrange(8)
    if how == 0:
        return content[:at]
    if how == 1:
        return b""
    if how == 2:
        return content[:at] + bytes(min(200, len(content) - at)) + content[at + 200 :]
    if how == 3:
        return content[:at] + rng.randbytes(30) + content[at:]
    if how == 4:
        return PICKLE
    if how == 5:
        return content + content
    if how == 6:
        return rng.randbytes(len(content))
    changed = bytearray(content)
    for _ in range(rng.choice([1, 3, 20])):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def change_safetensors(content: bytes, rng: random.Random) -> bytes:
    """A header that says something else: sizes, types, shapes, offsets, its own length."""
    if rng.random() < 0.3 or len(content) < 8:
        return change_bytes(content, rng)
    (length,) = struct.unpack("<Q", content[:8])
    if rng.random() < 0.2:
        return struct.pack("<Q", rng.choice([0, 1, length - 1, length + 1, 2**40, 2**64 - 1])) + content[8:]
    header = change_json(content[8 : 8 + length].decode(), rng).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


_GGUF_NAMES = (b"general.alignment", b"llama.block_count", b"llama.embedding_length", b"llama.attention.head_count")
_GGUF_NAMES += (b"tokenizer.ggml.tokens", b"tokenizer.ggml.merges", b"tokenizer.ggml.bos_token_id", b"general.name")
_GGUF_NAMES += (b"token_embd.weight", b"blk.0.attn_q.weight", b"blk.1.ffn_down.weight", b"output_norm.weight")
_SIZES = (0, 1, 2, 31, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)


def change_gguf(content: bytes, rng: random.Random) -> bytes:
    """A GGUF file whose counts, names, string lengths, types, sizes or offsets say something else, or that is cut."""
    if rng.random() < 0.2:
        return change_bytes(content, rng)
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 6])):
        how = rng.random()
        if how < 0.25:  # how many tensors, how many entries
            struct.pack_into("<Q", changed, rng.choice([8, 16]), rng.choice([*_SIZES, rng.randrange(1000)]))
        elif how < 0.75:
            name = rng.choice(_GGUF_NAMES)
            at = content.find(name)
            if at < 8:
                continue
            behind = at + len(name)  # a type and a value; of a tensor its axes, sizes, type and offset
            place = rng.choice([at - 8, at, behind, behind + 4, behind + 8, behind + 12, behind + 20, behind + 24])
            if place + 8 <= len(changed):
                struct.pack_into(*rng.choice([("<Q", changed, place, rng.choice(_SIZES)), ("<B", changed, place, 255)]))
        elif how < 0.85:
            return bytes(changed[: rng.randrange(len(changed))])
        else:
            changed[rng.randrange(min(len(changed), 3000))] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
    return bytes(changed)


def change_parquet(content: bytes, rng: random.Random) -> bytes:
    """A whole parquet file with other columns, types or rows."""
    if rng.random() < 0.25:
        return change_bytes(content, rng)
    frame = pd.read_parquet(io.BytesIO(content))
    for _ in range(rng.choice([1, 1, 2])):
        if not len(frame.columns):
            break
        column = rng.choice(list(frame.columns))
        how = rng.randrange(9)
        if how == 0:
            frame = frame.drop(columns=column)
        elif how == 1:
            frame = frame.rename(columns={column: rng.choice(["", "\u202e", "<b>", "other", "x" * 500])})
        elif how == 2:
            frame[column] = frame[column].astype(str)
        elif how == 3:
            frame[column] = [[1, 2]] * len(frame)
        elif how == 4:
            frame[column] = None
        elif how == 5:
            frame = frame.iloc[: rng.choice([0, 1])]
        elif how == 6:
            frame[column] = rng.choice([np.inf, -np.inf, np.nan, 1e300, -1.0, 0.0, 10**18, -(10**18)])
        elif how == 7:
            frame[column] = rng.choice(["", "a", "<script>1</script>", "\x1b[31m", "\u202e", "=1+1", "x" * 10_000])
        else:
            frame = pd.concat([frame] * rng.choice([2, 50]), ignore_index=True)
    buffer = io.BytesIO()
    frame.to_parquet(buffer, index=False)
    return buffer.getvalue()


def change_csv(content: bytes, rng: random.Random) -> bytes:
    """A table of text whose cells, separators or head say something else."""
    if rng.random() < 0.4:
        return change_bytes(content, rng)
    cells = re.split(r"([,\n])", content.decode("utf-8", "replace"))
    for _ in range(rng.choice([1, 3])):
        cells[rng.randrange(len(cells))] = rng.choice(["", "nan", "=1+1", '"', "1e999", "\u202e", "a,b", "\n", "\x00"])
    return "".join(cells).encode("utf-8", "surrogatepass")


_BY_ENDING = {".parquet": change_parquet, ".safetensors": change_safetensors, ".gguf": change_gguf, ".csv": change_csv}
_PICKLED = (".pt", ".pth", ".bin")


def change_file(path: Path, rng: random.Random) -> str:
    """Change a file in place, or put something else where it was; says what was done."""
    content, how = path.read_bytes(), rng.random()
    if how < 0.05:
        path.unlink()
        return "gone"
    if how < 0.1:
        path.unlink()
        path.mkdir()
        return "a folder"
    if how < 0.13:
        path.unlink()
        path.symlink_to(rng.choice([path.name, "/dev/null", "missing", "/"]))
        return "a link"
    if path.suffix in _PICKLED and how < 0.7:
        path.write_bytes(_pickled(content, rng))
        return "another pickle"
    if path.suffix in _BY_ENDING:
        path.write_bytes(_BY_ENDING[path.suffix](content, rng))
        return "other content"
    if path.suffix == ".json" and how < 0.85:
        try:
            path.write_text(change_json(content.decode(), rng), encoding="utf-8", errors="surrogatepass")
        except (ValueError, RecursionError):  # it was changed before, and is none any more
            path.write_bytes(change_bytes(content, rng))
        return "another shape"
    path.write_bytes(change_bytes(content, rng))
    return "other bytes"


def _pickled(content: bytes, rng: random.Random) -> bytes:
    import torch

    if rng.random() < 0.4:
        return rng.choice([PICKLE, b"", content[: len(content) // 2], b"PK\x03\x04garbage", pickle.dumps({"a": 1})])
    buffer = io.BytesIO()
    foreign: list[Any] = [
        {},
        [],
        None,
        {"state": {}, "param_groups": []},
        {"state": 3},
        torch.zeros(3),
        {"_step_count": "a"},
    ]
    foreign += [
        {"python": 1},
        {"state": {0: {"exp_avg": torch.zeros(1)}}, "param_groups": [{"lr": "a", "params": [0]}]},
        Evil(),
    ]
    torch.save(rng.choice(foreign), buffer)
    return buffer.getvalue()


def change_some_file(folder: Path, rng: random.Random, *, pattern: str = "*") -> str:
    """Change one file below a folder; says which, and what was done."""
    files = sorted(path for path in folder.rglob(pattern) if path.is_file() and not path.name.endswith(".html"))
    if not files:
        return "nothing"
    path = rng.choice(files)
    return f"{path.relative_to(folder)}: {change_file(path, rng)}"


def copy_of(template: Path, folder: Path) -> None:
    """A working folder of its own."""
    shutil.copytree(template, folder, symlinks=True, dirs_exist_ok=True)
