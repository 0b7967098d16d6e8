"""The page of a run: whole, self-contained, true to the tables, and harmless whatever the tokens say."""

import os
import re
import shutil
import subprocess
import sys
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sink_lens.errors import RunError
from sink_lens.records import create_run
from sink_lens.records.writing import PAGE_MARK
from sink_lens.report.html import page_html, render
from sink_lens.schema import table_of
from sink_lens.text import as_text, safe_line

from .circuits import CHAIN, LINKS, NODES, grid, write_run

LAYERS, HEADS, LENGTH, SUPERS = (
    30,
    9,
    64,
    {(1, 3): 0.61, (1, 7): 0.22, (11, 2): 0.48, (11, 5): 0.09},
)
IN_WORDS = {link: f"{NODES[index]} → {NODES[index + 1]}" for index, link in enumerate(LINKS)}
HOSTILE = (
    "<img src=x onerror=alert(1)>", "</script><script>alert(2)</script>", "\"'><svg onload=alert(3)>", "‮evil‏",
    "$\\frac{1}{0}$", "a" * 10_000, "\x00\x1b[31m\ufffe", "{{ 7 * 7 }}",
)  # fmt: skip
ODD = ("$x$", "<b>", "‮", "日本", "a&b", "\\frac", "_^", "'")
SIZE = {"layers": 6, "heads": 4, "length": 16}
SMALL = SIZE | {"neurons": 40}
PARTS = (
    ("heads",),
    ("layers", "conditions", "growth_steps"),
    ("links", "chain", "neurons", "tokens"),
    ("positions", "summary"),
    ("dimensions", "key_split", "patterns"),
)
"""Every file of a run, in groups that a folder may lack."""


def tables(*, layers=LAYERS, heads=HEADS, length=LENGTH, neurons=400):
    """Plausible tables of a model with a sink at position 0 and growth steps at layers 1 to 2 and 11."""
    draw, layer = np.random.default_rng(0), np.arange(layers)
    each = grid(layer=layer, head=range(heads))
    strength = 1 / (1 + np.exp(-(each["layer"] - 3) * 1.2)) * draw.beta(6, 2, len(each))
    is_sink = strength > 0.3
    scored = {
        "sink_score": strength,
        "sink_rate": is_sink.astype(float),
        "sink_mass": strength * 0.98,
    }
    scored |= {"entropy": 2 - strength, "label": np.where(is_sink, "no-op", "none")}
    frames = {"chain": CHAIN, "heads": each.assign(sink_position=0, **scored)}
    ratio = np.select([layer < 1, layer < 2, layer < 11], [1.1, 6.0, 30.0], 110.0) * np.linspace(
        1, 1.1, layers
    )
    frames["layers"] = pd.DataFrame(
        {
            "layer": layer,
            "sink_position": 0,
            "norm_ratio": ratio,
            "outlier_value": -ratio * 12.5,
            "sink_mass": 0.5,
        }
    )
    at = grid(
        site=("resid_pre", "z", "attn_out", "mlp_out", "resid_post"),
        layer=layer,
        position=range(length),
    )
    depth, first = at["layer"] / layers, at["position"] == 0
    law = (
        (1 + depth)
        / (at["position"] + 1) ** (0.3 + 0.2 * depth)
        * np.exp(draw.normal(0, 0.05, len(at)))
    )
    frames["positions"] = at.assign(
        s1=law.mask(first, 0.0), s2=law, norm=20 * np.where(first, ratio[at["layer"]], 1.0)
    )
    at = grid(layer=[1, 2, 11], neuron=range(neurons))
    planted = pd.MultiIndex.from_frame(at).map(SUPERS)
    share = np.where(planted.isna(), draw.normal(0, 0.004, len(at)), planted)
    spike = np.where(planted.isna(), np.exp(draw.normal(0, 0.7, len(at))), 300 * planted)
    rank = at["neuron"].astype("Int64") + 1
    made = {
        "activation": spike * 0.2,
        "spike_ratio": spike,
        "contribution": share * 900,
        "contribution_share": share,
    }
    made |= {
        "outlier_dimension": 378,
        "gate_norm_rank": rank,
        "up_norm_rank": rank,
        "is_super": share > 0.05,
    }
    frames["neurons"] = at.assign(
        sink_position=0, column_kurtosis=draw.gamma(2, 5, len(at)), **made
    )
    at = grid(layer=layer, dimension=[378, *range(0, 300, 20)])
    outlier, size = at["dimension"] == 378, ratio[at["layer"]]
    frames["dimensions"] = at.assign(
        sink_position=0, value=np.where(outlier, -size * 12.5, draw.normal(0, 6, len(at))), dominance_ratio=size * 2.4,
        is_outlier=outlier & (at["layer"] > 0),
    )  # fmt: skip
    steps = [(0, 1, min(2, layers - 1), 1.1, 31.0, 0, 378), (1, 11, 11, 32.0, 112.0, 0, 378)]
    names = [
        "step",
        "first_layer",
        "last_layer",
        "ratio_before",
        "ratio_after",
        "sink_position",
        "outlier_dimension",
    ]
    frames["growth_steps"] = pd.DataFrame(
        [step for step in steps if step[2] < layers], columns=names
    )
    frames["conditions"] = pd.DataFrame(
        {
            "condition": ["without", "with"], "chosen": [True, False], "sink_rate": [0.742, 0.801],
            "s2_ratio": [3.2, 3.9], "outlier_dimensions": ["378", "378,12"], "loss_nats": [3.61, 3.55],
        }
    )  # fmt: skip
    parts = {
        "key_cosine_random_dimensions": 0.1,
        "dimension": 4.0,
        "rest": 1.0,
        "bias": 0.0,
        "random_dimensions": 0.1,
    }
    parts |= {
        "key_cosine_sink": 0.9,
        "key_cosine_other_positions": 0.4,
        "logit_advantage_sink": 5.0,
    }
    frames["key_split"] = pd.DataFrame({"layer": layer[2:], **parts})
    rows = grid(
        link=LINKS, statistic=["ratio", "beside_it"], null_name=["other_positions", "random_init"]
    )
    verdicts = dict(
        zip(LINKS, ["holds", "fails", "holds", "holds", "undecided", "holds"], strict=True)
    )
    frames["links"] = rows.assign(
        value=3.21, ci_low=3.05, ci_high=3.4, null_value=rows["null_name"].map({"other_positions": 1.04}).fillna(1.11),
        criterion="holds if the interval of ratio is over 1.5 and over other_positions, random_init",
        verdict=rows["link"].map(verdicts), is_primary=rows["statistic"] == "ratio",
    )  # fmt: skip
    at = grid(sequence=range(2), position=range(length))
    words = ["Call", " me", " Ish", "mael", ".", " Some", " years", " ago"]
    texts = [words[index % len(words)] for index in range(len(at))]
    frames["tokens"] = at.assign(token_id=draw.integers(0, 49_000, len(at)), text=texts)
    return frames


def few(*names, layers=3, heads=2, length=9, neurons=9):
    """Some tables of a small run, for a page that is drawn sooner."""
    made = tables(layers=layers, heads=heads, length=length, neurons=neurons)
    return {name: frame for name, frame in made.items() if name in names}


def patterns(*, layers=LAYERS, heads=HEADS, length=LENGTH):
    """uint8 patterns, layer x head x query x key, with the sink of `tables` in the first column."""
    scores = np.random.default_rng(0).gamma(0.3, 1, (layers, heads, length, length)) * np.tri(
        length
    )
    scores[..., 0] += np.linspace(0.01, 1, layers)[:, None, None] * np.arange(1, length + 1) * 2
    return np.round(scores / scores.sum(-1, keepdims=True) * 255).astype(np.uint8)


SUMMARY = pd.DataFrame(
    {
        "quantity": ["sink_position", "sink_rate", "growth_steps", "effective_rank"],
        "value": [0, 0.74193548, "1-2, 11", 3.62222], "ci_low": [np.nan, 0.721, np.nan, 3.4],
        "ci_high": [np.nan, 0.763, np.nan, 3.9], "unit": ["position", "share of layers and heads", "layers", None],
        "note": [None, "sink score over 0.3", None, "middle layer"],
    }
)  # fmt: skip


def synthetic_run(folder, *, frames=None, summary=SUMMARY, drawn=None, without=(), **provenance):
    """A finished run folder with the tables of `frames`, but for the files named in `without`."""
    frames = tables() if frames is None else frames
    config = {
        "model": "default",
        "threshold": 0.3,
        "min_sink_rate": 0.05,
        "super_share": 0.05,
        "growth_factor": 2.0,
    }
    known = {
        "model": "SmolLM2-135M-Instruct (synthetic)", "weights_sha256": "ab" * 32, "tokens_sha256": "cd" * 32,
        "notes": ["the default model's weights are quantised (Q4_1); what is traced is the quantised model"],
        "bos_condition": "auto", "dtype": "float32", "kernel": "sdpa", "thresholds": {"threshold": 0.3},
        "versions": {"python": "3.11", "torch": "2.13.0"}, "seeds": {"tokens": None, "bootstrap": 0},
    }  # fmt: skip
    return write_run(
        folder, "trace", config=config, provenance=known | provenance,
        expects=(*frames, "summary", "patterns", "report"),
        tensors={} if "patterns" in without else {"patterns": {"pattern": patterns() if drawn is None else drawn}},
        **{name: frame for name, frame in (frames | {"summary": summary}).items() if name not in without},
    )  # fmt: skip


def hostile_run(folder):
    """A run whose every text wants to be more than text; half of its tokens are merely odd."""
    size = {"layers": 4, "heads": 3, "length": 16}
    frames = few("heads", "links", "conditions", "tokens", "growth_steps", "neurons", **size)
    frames["tokens"]["text"] = [*HOSTILE, *ODD] * 2
    frames["conditions"]["condition"] = HOSTILE[1:3]
    frames["links"]["criterion"] = [
        HOSTILE[index % len(HOSTILE)] for index in range(len(frames["links"]))
    ]
    frames["links"]["null_name"] = HOSTILE[0]
    return synthetic_run(
        folder, frames=frames, summary=SUMMARY.assign(note=HOSTILE[1]), drawn=patterns(**size), model=HOSTILE[0],
        notes=list(HOSTILE), prompts={text: text for text in HOSTILE},
    )  # fmt: skip


class Page(HTMLParser):
    """What a browser would find: elements with attributes, and the text that is shown."""

    def __init__(self, text):
        super().__init__()
        self.elements, self._shown, self._style = [], [], 0
        self.feed(text)
        self.text = re.sub(r"\s+", " ", "".join(self._shown))

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._style += tag in ("style", "script")

    def handle_endtag(self, tag):
        self._style -= tag in ("style", "script")

    def handle_data(self, data):
        if not self._style:
            self._shown.append(data)


def assert_harmless(text):
    page = Page(text)
    assert not {"iframe", "object", "embed", "link", "base", "form", "img"} & {
        tag for tag, _ in page.elements
    }
    assert {target["href"][:1] for tag, target in page.elements if tag == "a"} <= {"#"}
    policy = page.elements[3][1]["content"]
    assert "script-src 'sha256-" in policy
    assert not re.search(r"script-src [^;]*(unsafe|\*|data:|blob:)", policy)
    for kind, code in re.findall(r"<script([^>]*)>(.*?)</script>", text, flags=re.S):
        if "type=" not in kind:  # what runs at once is what the policy allows
            assert f"'sha256-{b64encode(sha256(code.encode()).digest()).decode()}'" in policy
    for tag, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
        for name in ("src", "href", "xlink:href", "action", "data"):
            target = attributes.get(name)
            assert target is None or target.startswith(("data:image/png;base64,", "#")), (
                tag,
                target,
            )
    assert "@import" not in text
    assert not re.search(r"https?://", text)
    assert "default-src 'none'" in text
    return page


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return render(synthetic_run(tmp_path_factory.mktemp("runs") / "whole"))


@pytest.fixture(scope="module")
def page(whole):
    return assert_harmless(whole.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "said",
    [
        "SmolLM2-135M-Instruct (synthetic)",
        "Position 0 is the attention sink",
        "of heads have the sink at position 0, at threshold 0.3",
        "[72%, 76%]",
        "Outlier dimension at position 0: 378.",
        "in 2 steps: layers 1 to 2 (×28.2) and layer 11 (×3.5)",
        "4 super neurons: L1.N3, L11.N2, L1.N7 and L11.N5",
        "quantised (Q4_1)",
        "4 of 6 links hold, 1 fails and 1 is undecided",
    ],
)
def test_the_headline_says_what_was_found(page, said):
    # 31.0 / 1.1 = 28.2; 112 / 32 = 3.5
    assert said in page.text


@pytest.mark.parametrize("link", LINKS)
def test_every_link_has_a_line_with_its_verdict(page, link):
    line = page.text.split("The chain, link by link", 1)[1].split(IN_WORDS[link], 1)[1][:400]
    assert re.search(r"✓ holds|✗ fails|\? undecided", line)
    assert "3.21" in line
    assert "[3.05, 3.4]" in line
    assert "other positions 1.04" in line
    judged = page.text.split("How each link is judged", 1)[1].split(IN_WORDS[link], 1)[1]
    assert judged.startswith(" holds if the interval of ratio is over 1.5 and over other po")


def test_ids_are_once_and_every_reference_has_its_target(page, whole):
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"url\(#([^)]+)\)", whole.read_text(encoding="utf-8"))) <= set(ids)
    assert {
        target[1:] for _, at in page.elements if (target := at.get("href", "")).startswith("#")
    } <= set(ids)


def test_provenance_super_neurons_and_arms_are_listed(page):
    foot, listed = (
        page.text.split(title, 1)[1] for title in ("Where these numbers come from", "Tables")
    )
    for value in (
        "ab" * 32,
        "cd" * 32,
        "sdpa",
        "2.13.0",
        "seeds.bootstrap",
        "thresholds.threshold",
    ):
        assert value in foot
    assert "config.super_share" in foot
    for value in ("378,12", "0.61", "3.55"):
        assert value in listed


def test_the_heads_of_tables_say_what_the_schema_says(page):
    """On hover, and in words below the table for those who cannot hover."""
    said = [
        attributes["title"]
        for tag, attributes in page.elements
        if tag == "th" and "title" in attributes
    ]
    neurons = table_of("trace", "neurons")
    known = [
        one.meaning
        for one in neurons.columns
        if one.name in ("activation", "spike_ratio", "contribution")
    ]
    assert set(known) <= set(said)
    for meaning in known:
        assert page.text.count(meaning) == said.count(meaning)


def test_hostile_text_and_odd_tokens_are_shown_as_text(tmp_path):
    hostile = page_html(hostile_run(tmp_path / "run"))
    page = assert_harmless(hostile)
    for text in HOSTILE:
        assert safe_line(text, limit=100)[:90].split("…")[0] in page.text
    assert len(page.text) < 20_000
    drawn = hostile.split('<ol class="tokens">')[1].split("</ol>")[0]
    for shown in ("$x$", "&lt;b&gt;", "⟨U+202E⟩", "日本", "a&amp;b", "\\frac"):
        assert shown in drawn


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return synthetic_run(
        tmp_path_factory.mktemp("runs") / "small", frames=tables(**SMALL), drawn=patterns(**SIZE)
    )


@pytest.fixture
def copied(small, tmp_path):
    return Path(shutil.copytree(small, tmp_path / "run"))


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("names", PARTS)
def test_what_a_partial_run_lacks_is_named_and_the_rest_is_shown(copied, names):
    assert {name for part in PARTS for name in part} == {path.stem for path in copied.iterdir()} - {
        "run"
    }
    for path in [path for path in copied.iterdir() if path.stem in names]:
        path.unlink()
    page = assert_harmless(page_html(copied))
    said = page.text.split("Not in this folder: ", 1)[1].split(". ", 1)[0]
    assert set(re.findall(r"\w+", said)) - {"and"} == set(names)
    assert page.text.count("Where these numbers come from") == 1
    assert sum(tag == "svg" for tag, _ in page.elements) >= (0 if "heads" in names else 4)


@pytest.mark.usefixtures("undrawn")
def test_a_run_with_nothing_but_its_record_has_a_page(tmp_path):
    frames = few(*(name for part in PARTS for name in part))
    folder = synthetic_run(
        tmp_path / "run", frames=frames, without=(*frames, "summary", "patterns")
    )
    page = assert_harmless(page_html(folder))
    assert "The sink was not measured" in page.text
    assert "This run has no table 'links'" in page.text


@pytest.mark.usefixtures("undrawn")
def test_a_damaged_table_is_named_and_the_rest_is_shown(copied, tmp_path):
    (copied / "neurons.parquet").write_bytes(b"PAR1 not really")
    (copied / "patterns.safetensors").write_bytes(b"\xff" * 40)
    page = assert_harmless(page_html(copied))
    assert str(tmp_path) not in page.text
    assert "Damaged: neurons. Everything else is shown." in page.text
    assert "neurons.parquet cannot be read: it is damaged" in page.text
    assert "patterns.safetensors cannot be read: it is damaged" in page.text
    assert sum(tag == "svg" for tag, _ in page.elements) == 5


@pytest.mark.usefixtures("undrawn")
def test_twenty_damaged_tables_are_named_and_the_others_counted(tmp_path):
    names = [f"table{number:02d}" for number in range(21)]
    with create_run(
        tmp_path / "run", kind="trace", config={}, provenance={"model": "toy"}, expects=()
    ) as writer:
        for name in names:
            writer.write_table(name, pd.DataFrame({"a": [1]}))
    for name in names:
        (tmp_path / "run" / f"{name}.parquet").write_bytes(b"PAR1 not really")
    assert (
        f"Damaged: {', '.join(names[:20])} and 1 more."
        in assert_harmless(page_html(tmp_path / "run")).text
    )


@pytest.mark.usefixtures("undrawn")
def test_an_interrupted_run_says_so(tmp_path):
    record = {
        "kind": "trace",
        "config": {},
        "provenance": {"model": "toy"},
        "expects": ("heads", "links"),
    }
    with pytest.raises(KeyboardInterrupt), create_run(tmp_path / "run", **record) as writer:
        writer.write_table("heads", few("heads")["heads"])
        raise KeyboardInterrupt
    page = assert_harmless(page_html(tmp_path / "run"))
    assert "This run was interrupted. Not in this folder: links." in page.text
    assert "threshold (not recorded)" in page.text


@pytest.mark.usefixtures("undrawn")
def test_a_model_without_a_sink_is_not_given_one(tmp_path):
    frames = tables(**SMALL)
    frames["heads"] = frames["heads"].assign(sink_rate=0.0, sink_score=0.02)
    frames["dimensions"]["is_outlier"] = False
    frames |= {name: frames[name].head(0) for name in ("growth_steps", "neurons")}
    folder = synthetic_run(
        tmp_path / "run", frames=frames, drawn=patterns(**SIZE), without=("summary",)
    )
    page = assert_harmless(page_html(folder))
    for said in (
        "No position is an attention sink",
        "Each cell is a head; none attends to position 0 above the threshold, most of all L0.H0 (score 0.02)",
        "No outlier dimension at position 0.",
        "has no growth step",
        "No super neuron was found",
    ):
        assert said in page.text


@pytest.mark.usefixtures("undrawn")
def test_what_was_not_measured_is_said_and_the_rest_is_drawn(tmp_path):
    """A run without a link, a column, the table of layers, the patterns and a gate."""
    frames = tables(**SMALL)
    frames["links"] = frames["links"].query("link != 'key_sink'")
    frames["neurons"]["gate_norm_rank"] = pd.array([pd.NA] * len(frames["neurons"]), dtype="Int64")
    del frames["layers"]
    text = page_html(synthetic_run(tmp_path / "run", frames=frames, without=("patterns",)))
    page = Page(text)
    assert "– not measured" in page.text.split(IN_WORDS["key_sink"], 1)[1][:200]
    assert "1 was not measured" in page.text
    assert "This run has no table &#39;layers&#39;" in text
    assert "<svg" in text.split('id="neurons-figure"')[1].split("</figure>")[0]


@pytest.mark.usefixtures("undrawn")
def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    folder = synthetic_run(tmp_path / "run", frames=few("links"), without=("patterns",))
    (folder / "report.html").write_bytes(PAGE_MARK + b"old")

    def full(self, target):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(RunError, match="No space left"):
        render(folder)
    assert (folder / "report.html").read_bytes() == PAGE_MARK + b"old"
    assert not list(folder.glob(".*.sink_lens"))


def test_the_command_renders_without_torch_and_the_same_again(whole, tmp_path):
    again = tmp_path / "again.html"
    code = (
        "import sys\nfrom sink_lens.cli import main\n"
        f"sys.argv = ['sink-lens', 'report', {str(whole.parent)!r}, '--out', {str(again)!r}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "print([name for name in ('torch', 'transformers', 'matplotlib.pyplot') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"report: {again}", "[]"]
    assert again.read_bytes() == whole.read_bytes()


def test_a_page_of_a_large_model_stays_under_5_mb(tmp_path):
    size = {"layers": 80, "heads": 128, "length": 64}
    frames = few(
        "heads", "tokens", "neurons", "growth_steps", **size, neurons=28_672
    )  # what grows with the model
    drawn = np.zeros((80, 128, 64, 64), dtype=np.uint8)
    assert (
        render(synthetic_run(tmp_path / "run", frames=frames, drawn=drawn)).stat().st_size
        < 4_000_000
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (262.88, "263"), (0.00001234, "1.2e−05"), (-0.5, "−0.5"), (4096.0, "4,096"), (12, "12"),
        (float("nan"), "undefined"), (None, "undefined"), (float("-inf"), "−∞"), (True, "yes"), ("<b>", "<b>"),
    ],
)  # fmt: skip
def test_numbers_are_written_to_three_digits(value, text):
    assert as_text(value) == text


def test_cut_text_says_how_long_it_was_and_invisible_characters_are_named():
    assert safe_line("a" * 10_000, limit=5) == "aaaaa… (10,000 characters)"
    assert safe_line("a" * 10_000, limit=5, counted=False) == "aaaaa…"
    assert safe_line("abcde", limit=5) == "abcde"
    assert safe_line("a‮b\n\ud800​") == "a⟨U+202E⟩b↵⟨U+D800⟩⟨U+200B⟩"
