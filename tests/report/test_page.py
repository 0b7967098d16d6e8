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
from sink_lens.report.html import page_text, render
from sink_lens.schema import table_of
from sink_lens.text import number, visible

from .circuits import CHAIN, LINKS, NODES

LAYERS, HEADS, LENGTH, SUPERS = 30, 9, 64, {(1, 1234): 0.61, (1, 77): 0.22, (11, 300): 0.48, (11, 15): 0.09}
IN_WORDS = {link: f"{NODES[index]} → {NODES[index + 1]}" for index, link in enumerate(LINKS)}
HOSTILE = (
    "<img src=x onerror=alert(1)>", "</script><script>alert(2)</script>", "\"'><svg onload=alert(3)>", "‮evil‏",
    "$\\frac{1}{0}$", "a" * 10_000, "\x00\x1b[31m\ufffe", "{{ 7 * 7 }}",
)  # fmt: skip
ODD = ("$x$", "<b>", "‮", "日本", "a&b", "\\frac", "_^", "'")
PARTS = (
    ("heads",),
    ("layers", "conditions", "growth_steps"),
    ("links", "chain", "neurons", "tokens"),
    ("positions", "summary"),
    ("dimensions", "key_split", "patterns"),
)
"""Every file of a run, in groups that a folder may lack."""


def tables(*, layers=LAYERS, heads=HEADS, length=LENGTH, neurons=400, supers=None, seed=0):
    """Plausible tables of a model with a sink at position 0 and growth steps at layers 1 to 2 and 11."""
    draw = np.random.default_rng(seed)
    supers = SUPERS if supers is None else supers
    grid = pd.MultiIndex.from_product([range(layers), range(heads)], names=["layer", "head"]).to_frame(index=False)
    strength = 1 / (1 + np.exp(-(grid["layer"] - 3) * 1.2)) * draw.beta(6, 2, len(grid))
    frames = {
        "chain": CHAIN,
        "heads": grid.assign(
            sink_position=0,
            sink_score=strength,
            sink_rate=(strength > 0.3).astype(float),
            sink_mass=strength * 0.98,
            entropy=2 - strength,
            label=np.where(strength > 0.3, "no-op", "none"),
        ),
    }
    layer = np.arange(layers)
    ratio = np.where(layer < 1, 1.1, np.where(layer < 2, 6.0, np.where(layer < 11, 30.0, 110.0)))
    ratio = ratio * np.linspace(1, 1.1, layers)
    frames["layers"] = pd.DataFrame(
        {"layer": layer, "sink_position": 0, "norm_ratio": ratio, "outlier_value": -ratio * 12.5, "sink_mass": 0.5}
    )
    place = np.arange(length)
    rows = []
    for site in ("resid_pre", "z", "attn_out", "mlp_out", "resid_post"):
        for at in layer:
            law = (1 + at / layers) / (place + 1) ** (0.3 + 0.2 * at / layers)
            noise = np.exp(draw.normal(0, 0.05, length))
            norm = np.where(place == 0, ratio[at], 1.0) * 20
            s1 = np.where(place == 0, 0.0, law * noise)
            rows.append(
                pd.DataFrame({"layer": at, "site": site, "position": place, "s1": s1, "s2": law * noise, "norm": norm})
            )
    frames["positions"] = pd.concat(rows, ignore_index=True)
    rows = []
    for at in (1, 2, 11):
        table = pd.DataFrame({"layer": at, "neuron": range(neurons), "sink_position": 0})
        share = draw.normal(0, 0.004, neurons)
        spike = np.exp(draw.normal(0, 0.7, neurons))
        for (of, neuron), value in supers.items():
            if of == at:
                share[neuron % neurons], spike[neuron % neurons] = value, 300 * value
        rank = draw.permutation(neurons) + 1
        table = table.assign(
            activation=spike * 0.2,
            spike_ratio=spike,
            contribution=share * 900,
            contribution_share=share,
            outlier_dimension=378,
            gate_norm_rank=pd.array(rank, dtype="Int64"),
            up_norm_rank=pd.array(draw.permutation(neurons) + 1, dtype="Int64"),
            column_kurtosis=draw.gamma(2, 5, neurons),
            is_super=share > 0.05,
        )
        rows.append(table)
    frames["neurons"] = pd.concat(rows, ignore_index=True)
    rows = []
    for at in layer:
        names = [378, *draw.choice(np.setdiff1d(np.arange(576), [378]), 15, replace=False)]
        values = np.concatenate([[-ratio[at] * 12.5], draw.normal(0, 6, 15)])
        table = pd.DataFrame({"layer": at, "sink_position": 0, "dimension": names, "value": values})
        rows.append(table.assign(dominance_ratio=ratio[at] * 2.4, is_outlier=(table.index == 0) & (at > 0)))
    frames["dimensions"] = pd.concat(rows, ignore_index=True)
    steps = [(0, 1, min(2, layers - 1), 1.1, 31.0, 0, 378), (1, 11, 11, 32.0, 112.0, 0, 378)]
    names = ["step", "first_layer", "last_layer", "ratio_before", "ratio_after", "sink_position", "outlier_dimension"]
    frames["growth_steps"] = pd.DataFrame([step for step in steps if step[2] < layers], columns=names)
    frames["conditions"] = pd.DataFrame(
        {
            "condition": ["without", "with"], "chosen": [True, False], "sink_rate": [0.742, 0.801],
            "s2_ratio": [3.2, 3.9], "outlier_dimensions": ["378", "378,12"], "loss_nats": [3.61, 3.55],
        }
    )  # fmt: skip
    verdicts = dict(zip(LINKS, ["holds", "fails", "holds", "holds", "undecided", "holds"], strict=True))
    rows = []
    for link, verdict in verdicts.items():
        criterion = "holds if the interval of ratio is over 1.5 and over other_positions, random_init"
        for statistic, primary in (("ratio", True), ("beside_it", False)):
            for null, null_value in (("other_positions", 1.04), ("random_init", 1.11)):
                row = (link, statistic, 3.21, 3.05, 3.4, null, null_value, criterion, verdict, primary)
                rows.append(row)
    frames["key_split"] = pd.DataFrame({"layer": layer[2:], "key_cosine_sink": 0.9, "key_cosine_other_positions": 0.4})
    parts = {"key_cosine_random_dimensions": 0.1, "dimension": 4.0, "rest": 1.0, "bias": 0.0, "random_dimensions": 0.1}
    frames["key_split"] = frames["key_split"].assign(**parts, logit_advantage_sink=5.0)
    names = ["link", "statistic", "value", "ci_low", "ci_high", "null_name", "null_value"]
    frames["links"] = pd.DataFrame(rows, columns=[*names, "criterion", "verdict", "is_primary"])
    words = ["Call", " me", " Ish", "mael", ".", " Some", " years", " ago"]
    frames["tokens"] = pd.DataFrame(
        {
            "sequence": np.repeat([0, 1], length),
            "position": np.tile(place, 2),
            "token_id": draw.integers(0, 49_000, 2 * length),
            "text": [words[index % len(words)] for index in range(2 * length)],
        }
    )
    return frames


def few(*names, layers=3, heads=2, length=9, neurons=9):
    """Some tables of a small run, for a page that is drawn sooner."""
    return {
        name: frame
        for name, frame in tables(layers=layers, heads=heads, length=length, neurons=neurons).items()
        if name in names
    }


def patterns(*, layers=LAYERS, heads=HEADS, length=LENGTH, seed=0):
    """uint8 patterns, layer x head x query x key, with the sink of `tables` in the first column."""
    draw = np.random.default_rng(seed)
    n = min(length, 64)
    scores = draw.gamma(0.3, 1, (layers, heads, n, n)) * np.tril(np.ones((n, n)))
    scores[..., 0] += np.linspace(0.01, 1, layers)[:, None, None] * np.arange(1, n + 1) * 2
    return np.round(scores / scores.sum(-1, keepdims=True) * 255).astype(np.uint8)


SUMMARY = pd.DataFrame(
    {
        "quantity": ["sink_position", "sink_rate", "growth_steps", "effective_rank"],
        "value": [0, 0.74193548, "1-2, 11", 3.62222],
        "ci_low": [np.nan, 0.721, np.nan, 3.4],
        "ci_high": [np.nan, 0.763, np.nan, 3.9],
        "unit": ["position", "share of layers and heads", "layers", None],
        "note": [None, "sink score over 0.3", None, "middle layer"],
    }
)


def synthetic_run(folder, *, frames=None, summary=SUMMARY, drawn=None, without=(), **provenance):
    """A finished run folder with the tables of `frames`, but for the files named in `without`."""
    frames = tables() if frames is None else frames
    config = {"model": "default", "threshold": 0.3, "min_sink_rate": 0.05, "super_share": 0.05, "growth_factor": 2.0}
    known = {
        "model": "SmolLM2-135M-Instruct (synthetic)",
        "weights_sha256": "ab" * 32,
        "notes": ["the default model's weights are quantised (Q4_1); what is traced is the quantised model"],
        "tokens_sha256": "cd" * 32,
        "bos_condition": "auto",
        "dtype": "float32",
        "kernel": "sdpa",
        "versions": {"python": "3.11", "torch": "2.13.0", "transformers": None},
        "seeds": {"tokens": None, "bootstrap": 0},
        "thresholds": {"threshold": 0.3},
    }
    expects = (*frames, "summary", "patterns", "report")
    with create_run(
        folder, kind="trace", config=config, provenance=known | provenance, expects=expects, overwrite=True
    ) as writer:
        for name, frame in frames.items():
            if name not in without:
                writer.write_table(name, frame)
        if "summary" not in without:
            writer.write_csv("summary", summary)
        if "patterns" not in without:
            writer.write_tensors("patterns", {"pattern": patterns() if drawn is None else drawn})
    return folder


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
    assert not {"iframe", "object", "embed", "link", "base", "form", "img"} & {tag for tag, _ in page.elements}
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
            assert target is None or target.startswith(("data:image/png;base64,", "#")), (tag, target)
    assert "@import" not in text
    assert not re.search(r"https?://", text)
    assert "default-src 'none'" in text
    return page


@pytest.fixture
def undrawn(monkeypatch):
    """Figures are made and not drawn: for tests of what stands around them."""
    monkeypatch.setattr("sink_lens.report.html.figure_svg", lambda figure, *, name: f"<svg id='{name}'></svg>")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return synthetic_run(tmp_path_factory.mktemp("runs") / "whole")


@pytest.fixture(scope="module")
def page(whole):
    return assert_harmless(render(whole).read_text(encoding="utf-8"))


@pytest.mark.usefixtures("undrawn")
def test_nothing_but_the_page_is_written(tmp_path):
    folder = synthetic_run(tmp_path / "run", frames=few("links", "conditions"), without=("patterns",))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert render(folder) == folder / "report.html"
    after = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "report.html"}
    assert after == before


@pytest.mark.parametrize(
    "said",
    [
        "SmolLM2-135M-Instruct (synthetic)",
        "Position 0 is the attention sink",
        "of heads have the sink at position 0, at threshold 0.3",
        "[72%, 76%]",
        "Outlier dimension at position 0: 378.",
        "in 2 steps: layers 1 to 2 (×28.2) and layer 11 (×3.5)",
        "4 super neurons: L1.N34, L11.N300, L1.N77 and L11.N15",
        "quantised (Q4_1)",
        "traced, not assumed",
        "4 of 6 links hold, 1 fails and 1 is undecided",
    ],
)
def test_the_headline_says_what_was_found(page, said):
    # 31.0 / 1.1 = 28.2; 112 / 32 = 3.5; neuron 1234 of a layer of 400 is 1234 - 3 x 400 = 34
    assert said in page.text


@pytest.mark.parametrize("link", LINKS)
def test_every_link_has_a_line_with_its_verdict(page, link):
    line = page.text.split("The chain, link by link", 1)[1].split(IN_WORDS[link], 1)[1][:400]
    assert re.search(r"✓ holds|✗ fails|\? undecided", line)
    assert "3.21" in line
    assert "[3.05, 3.4]" in line
    assert "other positions 1.04" in line
    judged = page.text.split("How each link is judged", 1)[1]
    assert judged.split(IN_WORDS[link], 1)[1].startswith(
        " holds if the interval of ratio is over 1.5 and over other po"
    )


@pytest.mark.parametrize("key", ["circuit", "scores", "mass", "variance", "norms", "dims", "neurons", "qk"])
def test_every_figure_is_drawn_with_a_sentence(page, key):
    places = [index for index, (_, attributes) in enumerate(page.elements) if attributes.get("id") == f"{key}-figure"]
    after = [tag for tag, _ in page.elements[places[0] : places[0] + 9]]
    assert "figcaption" in after
    assert "svg" in after


def test_ids_are_once_and_every_reference_has_its_target(page, whole):
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    text = (whole / "report.html").read_text(encoding="utf-8")
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(ids)
    assert {target[1:] for _, at in page.elements if (target := at.get("href", "")).startswith("#")} <= set(ids)


@pytest.mark.parametrize(
    "value", ["ab" * 32, "cd" * 32, "sdpa", "2.13.0", "seeds.bootstrap", "thresholds.threshold", "config.super_share"]
)
def test_the_provenance_stands_at_the_foot(page, value):
    assert value in page.text.split("Where these numbers come from")[1]


def test_super_neurons_and_arms_are_listed(page):
    listed = page.text.split("Tables", 1)[1]
    assert "378,12" in listed
    assert "0.61" in listed
    assert "3.55" in listed


def test_the_heads_of_tables_say_what_the_schema_says(page):
    """On hover, and in words below the table for those who cannot hover."""
    said = [attributes["title"] for tag, attributes in page.elements if tag == "th" and "title" in attributes]
    neurons = table_of("trace", "neurons")
    known = [one.meaning for one in neurons.columns if one.name in ("activation", "spike_ratio", "contribution")]
    assert set(known) <= set(said)
    for meaning in known:
        assert page.text.count(meaning) == said.count(meaning)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """The page of a run whose every text wants to be more than text; half of its tokens are merely odd."""
    frames = few("heads", "links", "conditions", "tokens", "growth_steps", "neurons", layers=4, heads=3, length=16)
    frames["tokens"]["text"] = [*HOSTILE, *ODD] * 2
    frames["conditions"]["condition"] = HOSTILE[1:3]
    frames["links"]["criterion"] = [HOSTILE[index % len(HOSTILE)] for index in range(len(frames["links"]))]
    frames["links"]["null_name"] = HOSTILE[0]
    folder = synthetic_run(
        tmp_path_factory.mktemp("runs") / "hostile", frames=frames, summary=SUMMARY.assign(note=HOSTILE[1]),
        drawn=patterns(layers=4, heads=3, length=16), model=HOSTILE[0], notes=list(HOSTILE),
        prompts={text: text for text in HOSTILE},
    )  # fmt: skip
    return page_text(folder)


def test_hostile_text_and_odd_tokens_are_shown_as_text(hostile):
    page = assert_harmless(hostile)
    for text in HOSTILE:
        assert visible(text, limit=100)[:90].split("…")[0] in page.text
    assert len(page.text) < 20_000
    drawn = hostile.split('<ol class="tokens">')[1].split("</ol>")[0]
    for shown in ("$x$", "&lt;b&gt;", "⟨U+202E⟩", "日本", "a&amp;b", "\\frac"):
        assert shown in drawn


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    size = {"layers": 6, "heads": 4, "length": 16}
    return synthetic_run(
        tmp_path_factory.mktemp("runs") / "small", frames=tables(**size, neurons=40), drawn=patterns(**size)
    )


@pytest.fixture
def copied(small, tmp_path):
    return Path(shutil.copytree(small, tmp_path / "run"))


def test_the_parts_are_all_files_of_a_run(small):
    assert {name for part in PARTS for name in part} == {path.stem for path in small.iterdir()} - {"run"}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("names", PARTS)
def test_what_a_partial_run_lacks_is_named_and_the_rest_is_shown(copied, names):
    for path in [path for path in copied.iterdir() if path.stem in names]:
        path.unlink()
    page = assert_harmless(page_text(copied))
    said = page.text.split("Not in this folder: ", 1)[1].split(". ", 1)[0]
    assert set(re.findall(r"\w+", said)) - {"and"} == set(names)
    assert page.text.count("Where these numbers come from") == 1
    assert sum(tag == "svg" for tag, _ in page.elements) >= (0 if "heads" in names else 4)


@pytest.mark.usefixtures("undrawn")
def test_a_run_with_nothing_but_its_record_has_a_page(tmp_path):
    frames = few(*(name for part in PARTS for name in part))
    folder = synthetic_run(tmp_path / "run", frames=frames, without=(*frames, "summary", "patterns"))
    page = assert_harmless(page_text(folder))
    assert "The sink was not measured" in page.text
    assert "This run has no table 'links'" in page.text


@pytest.mark.usefixtures("undrawn")
def test_a_damaged_table_is_named_and_the_rest_is_shown(copied, tmp_path):
    (copied / "neurons.parquet").write_bytes(b"PAR1 not really")
    (copied / "patterns.safetensors").write_bytes(b"\xff" * 40)
    page = assert_harmless(page_text(copied))
    assert str(tmp_path) not in page.text
    assert "Damaged: neurons. Everything else is shown." in page.text
    assert "neurons.parquet cannot be read: it is damaged" in page.text
    assert "patterns.safetensors cannot be read: it is damaged" in page.text
    assert sum(tag == "svg" for tag, _ in page.elements) == 7


@pytest.mark.usefixtures("undrawn")
def test_an_interrupted_run_says_so(tmp_path):
    with (
        pytest.raises(KeyboardInterrupt),
        create_run(
            tmp_path / "run", kind="trace", config={}, provenance={"model": "toy"}, expects=("heads", "links")
        ) as writer,
    ):
        writer.write_table("heads", few("heads")["heads"])
        raise KeyboardInterrupt
    page = assert_harmless(page_text(tmp_path / "run"))
    assert "This run was interrupted. Not in this folder: links." in page.text
    assert "threshold (not recorded)" in page.text


@pytest.mark.usefixtures("undrawn")
def test_a_model_without_a_sink_is_not_given_one(tmp_path):
    frames = tables(layers=6, heads=4, length=16, neurons=40, supers={})
    frames["heads"]["sink_rate"] = 0.0
    frames["heads"]["sink_score"] = 0.02
    frames["dimensions"]["is_outlier"] = False
    frames["growth_steps"] = frames["growth_steps"].head(0)
    frames["neurons"] = frames["neurons"].head(0)
    drawn = patterns(layers=6, heads=4, length=16)
    folder = synthetic_run(tmp_path / "run", frames=frames, drawn=drawn, without=("summary",))
    page = assert_harmless(page_text(folder))
    for said in (
        "No position is an attention sink",
        "Each cell is a head; none attends to position 0 above the threshold, most of all L0.H0 (score 0.02)",
        "No outlier dimension at position 0.",
        "has no growth step",
        "No super neuron was found",
        "there is no onset",
    ):
        assert said in page.text


@pytest.mark.usefixtures("undrawn")
def test_what_was_not_measured_is_said_and_the_rest_is_drawn(tmp_path):
    """A run without a link, a column, the table of layers, the patterns and a gate."""
    frames = tables(layers=6, heads=4, length=16, neurons=40)
    frames["links"] = frames["links"].query("link != 'key_sink'")
    frames["heads"] = frames["heads"].drop(columns="sink_mass")
    frames["neurons"]["gate_norm_rank"] = pd.array([pd.NA] * len(frames["neurons"]), dtype="Int64")
    del frames["layers"]
    text = page_text(synthetic_run(tmp_path / "run", frames=frames, without=("patterns",)))
    page = Page(text)
    assert "– not measured" in page.text.split(IN_WORDS["key_sink"], 1)[1][:200]
    assert "1 was not measured" in page.text
    assert "The table &#39;heads&#39; lacks sink_mass" in text
    assert "This run has no table &#39;layers&#39;" in text
    assert "<svg" in text.split('id="neurons-figure"')[1].split("</figure>")[0]


@pytest.mark.usefixtures("undrawn")
def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    folder = synthetic_run(tmp_path / "run", frames=few("links"), without=("patterns",))
    (folder / "report.html").write_text("old")

    def full(self, target):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(RunError, match="No space left"):
        render(folder)
    assert (folder / "report.html").read_text() == "old"
    assert not list(folder.glob("*.part"))


def test_the_command_renders_without_torch_and_the_same_again(whole, page, tmp_path):
    assert page.text
    again = tmp_path / "again.html"
    code = (
        "import sys\nfrom sink_lens.cli import main\n"
        f"sys.argv = ['sink-lens', 'report', {str(whole)!r}, '--out', {str(again)!r}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "print([name for name in ('torch', 'transformers', 'matplotlib.pyplot') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"report: {again}", "[]"]
    assert again.read_bytes() == (whole / "report.html").read_bytes()


def test_a_page_of_a_large_model_stays_under_5_mb(tmp_path):
    size = {"layers": 80, "heads": 128, "length": 64}
    frames = few("heads", "tokens", "neurons", "growth_steps", **size, neurons=28_672)  # what grows with the model
    drawn = np.zeros((80, 128, 64, 64), dtype=np.uint8)
    path = render(synthetic_run(tmp_path / "run", frames=frames, drawn=drawn))
    assert path.stat().st_size < 4_000_000


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (262.88, "263"), (0.00001234, "1.2e−05"), (-0.5, "−0.5"), (4096.0, "4,096"), (12, "12"),
        (float("nan"), "undefined"), (None, "undefined"), (float("-inf"), "−∞"), (True, "yes"), ("<b>", "<b>"),
    ],
)  # fmt: skip
def test_numbers_are_written_to_three_digits(value, text):
    assert number(value) == text


def test_cut_text_says_how_long_it_was_and_invisible_characters_are_named():
    assert visible("a" * 10_000, limit=5) == "aaaaa… (10,000 characters)"
    assert visible("a" * 10_000, limit=5, counted=False) == "aaaaa…"
    assert visible("abcde", limit=5) == "abcde"
    assert visible("a‮b\n\ud800​") == "a⟨U+202E⟩b↵⟨U+D800⟩⟨U+200B⟩"
