"""CircuitsVis views: what is shown is what was measured, from arrays, captures and runs, and nothing is fetched."""

import html
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lenses import speaking

from sink_lens.activations.record import capture
from sink_lens.data.tokens import from_prompts
from sink_lens.errors import InputError, RunError
from sink_lens.records import read_run
from sink_lens.report import views
from sink_lens.report.offline import script_hashes

from .circuits import tables, traced, write_run
from .test_page import HOSTILE

PATTERN = np.tril(np.ones((8, 8))) / np.arange(1, 9)[:, None]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return read_run(traced(tmp_path_factory.mktemp("run")))


def captured(site="pattern", layers=(3, 5)):
    """What a capture of two sequences looks like: of patterns with 4 heads, or of 20 neurons."""
    shape = (2, 4, 8, 8) if site == "pattern" else (2, 8, 20)
    return SimpleNamespace(tensors={(site, layer): np.full(shape, layer / 10) for layer in layers})


def data(page):
    """What the script of a page draws: kind, props."""
    return json.loads(re.search(r"const \[kind, props\] = (\[.*\]);\n", page)[1])


def test_an_array_is_shown_number_for_number():
    kind, props = data(views.attention_heads(PATTERN, list("abcdefgh")).html)
    assert kind == "AttentionHeads"
    assert props["attention"] == [np.round(PATTERN, 4).tolist()]
    assert props["tokens"] == list("abcdefgh")
    assert props["attentionHeadNames"] == ["head·0"]


def test_a_capture_is_shown_by_layer_and_head():
    view = views.attention_patterns(captured(), sequence=1, heads=[0, 3])
    assert view.props["headLabels"] == ["L3.H0", "L3.H3", "L5.H0", "L5.H3"]
    assert view.props["attention"][:, 0, 0].tolist() == [0.3, 0.3, 0.5, 0.5]
    assert view.props["tokens"] == [str(place) for place in range(8)]
    assert views.attention_heads(captured(), layers=[5]).props["attention"].shape == (4, 8, 8)


def test_a_tensor_and_a_token_batch_are_read():
    batch = SimpleNamespace(tokens=np.arange(16).reshape(2, 8))
    tokenizer = SimpleNamespace(decode=lambda ids: f"t{ids[0]}")
    pattern = torch.tensor(PATTERN)
    view = views.attention_heads(pattern, batch, sequence=1, tokenizer=tokenizer)
    assert view.props["tokens"] == [f"t{place}" for place in range(8, 16)]
    assert view.props["attention"][0] == pytest.approx(PATTERN)
    with pytest.raises(InputError, match=r"Pass tokenizer=lens\.tokenizer"):
        views.attention_heads(pattern, batch)


def test_a_run_shows_its_strongest_heads_and_its_tokens(run):
    view = views.attention_heads(run)
    names = "L11.H3 L11.H2 L11.H1 L11.H0 L10.H3 L10.H2 L0.H1 L0.H0"
    assert view.props["attentionHeadNames"] == names.split()
    assert view.props["attention"][..., 0].tolist() == np.ones((8, 8)).tolist()
    assert view.props["tokens"] == ["a"] * 8
    assert views.attention_heads(run, heads=[(2, 1)]).props["attentionHeadNames"] == ["L2.H1"]


def test_tokens_are_coloured_by_the_attention_they_get_from_those_after_them(run):
    assert np.isnan(
        views.colored_tokens(run).props["values"]
    ).all()  # of 8 tokens none has 8 after it
    # Uniform attention over the past: of 10 tokens the first two have 8 or more after them.
    uniform = np.tril(np.ones((10, 10))) / np.arange(1, 11)[:, None]
    view = views.colored_tokens(SimpleNamespace(tensors={("pattern", 0): uniform[None, None]}))
    assert np.isnan(view.props["values"][2:]).all()
    assert view.props["values"][1] == pytest.approx(sum(1 / n for n in range(3, 11)) / 8)
    assert "the last 8 are not coloured: fewer than 8 come after them" in view.title
    assert f"<h1>{view.title}</h1>" in view.html
    shown = views.colored_tokens([0.5, -2.0], ["x", "y"]).props
    assert (shown["minValue"], shown["maxValue"]) == (-2.0, 2.0)


def test_padding_is_no_later_token_and_is_not_shown():
    lens = speaking()
    short, long = TEXT, f"{TEXT} {TEXT}"
    batch = from_prompts([short, long], lens.tokenizer)
    n, alone = int(batch.lengths[0]), capture(lens, [short], sites=["pattern"])
    assert n < batch.n_positions
    given = {"tokenizer": lens.tokenizer}
    wanted = views.colored_tokens(alone, batch[:1].cut(n), **given).props
    for tokens in (batch, batch[:1]):
        found = capture(lens, tokens, sites=["pattern"])
        shown = views.colored_tokens(found, tokens, **given).props
        assert shown["values"] == pytest.approx(wanted["values"], nan_ok=True, abs=1e-6)
        assert shown["tokens"] == wanted["tokens"]
        assert views.attention_heads(found, tokens, **given).props["attention"].shape[1:] == (n, n)
    ids, mask = (one[:1].long().roll(1, 1) for one in (batch.tokens, batch.valid))
    left = {"input_ids": ids, "attention_mask": mask}
    shifted = views.colored_tokens(capture(lens, left, sites=["pattern"])).props["values"]
    assert shifted[1 : n + 1] == pytest.approx(wanted["values"], nan_ok=True, abs=1e-6)


def test_hostile_tokens_cannot_leave_their_place():
    names = [*HOSTILE, "", "b"]
    shown = {
        "heads": views.attention_heads(np.ones((10, 10)), names),
        "patterns": views.attention_patterns(names, np.ones((10, 10))),
        "tokens": views.colored_tokens(np.arange(10), names),
    }
    for page in (view.html for view in shown.values()):
        script = page.split("<script>")[1].split("</script>")[0]
        assert page.count("<script>") == 1
        assert page.count("</script>") == 1
        assert script.endswith("})();")
        _, props = data(page)
        texts = json.dumps([props["tokens"], props.get("attentionHeadNames")])
        assert "evil" in texts
        assert not re.search(r"[<&](?!\\u2060)", texts)
        assert all(0 < len(text) < 60 for text in props["tokens"])
    framed = shown["heads"]._repr_html_()
    assert 'sandbox="allow-scripts"' in framed
    assert "<script" not in framed
    assert html.unescape(framed.split('srcdoc="')[1].rstrip("></iframe")[:-1]).startswith(
        "<!doctype html>"
    )


def test_a_page_allows_nothing_but_its_own_scripts():
    single = views.attention_heads(PATTERN).html
    assert len(single) < 700_000
    policy = re.search('Content-Security-Policy" content="([^"]*)"', single)[1]
    script = single.split("<script>")[1].split("</script>")[0]
    assert policy.endswith(f"script-src {script_hashes(script, views.read_javascript())}")
    assert policy.startswith("default-src 'none'")
    assert "unpkg" not in single
    assert "sourceMappingURL" not in views.read_javascript()


def test_a_view_is_saved_as_a_page(tmp_path):
    path = views.colored_tokens([1.0], ["x"]).save(tmp_path / "new" / "view.html")
    with pytest.raises(InputError, match=r"need \.html for a page\. Figures as \.png"):
        views.colored_tokens([1.0], ["x"]).save(tmp_path / "view.png")
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_what_cannot_be_shown_is_refused(run, tmp_path):
    for source, options, message in (
        (np.ones((2, 3)), {}, r"as many queries as keys; found \(1, 2, 3\)"),
        (-np.inf, {}, r"as many queries as keys; found \(\)"),
        (
            np.ones((90, 90, 90)),
            {},
            "729,000 numbers are too many for a browser; need 600,000 at most",
        ),
        (
            captured("neurons"),
            {},
            r"'pattern' of layers \[\]|'pattern' was captured in layers \[\]",
        ),
        (PATTERN, {"tokens": ["a", "b", "c"]}, "there are 3 tokens for 8 positions; need one each"),
        (captured(), {"sequence": 2}, "sequence 2 was not captured; need 0 to 1"),
        (captured(), {"heads": [4]}, "head 4 does not exist; need 0 to 3"),
        (run, {"heads": [(12, 0)]}, r"L12\.H0 is not kept"),
    ):
        with pytest.raises(InputError, match=message):
            views.attention_heads(source, **options)
    with pytest.raises(InputError, match="one number per token"):
        views.colored_tokens(np.ones((2, 2)))
    with pytest.raises(InputError, match="the device meta, which holds no values, without numbers"):
        views.colored_tokens(torch.ones(4, device="meta"))
    bare = read_run(traced(tmp_path / "bare", frames=tables(steps=()), without=("patterns",)))
    with pytest.raises(RunError, match=r"patterns\.safetensors"):
        views.attention_heads(bare)


def test_views_of_a_run_of_another_kind_name_the_command_that_makes_one(tmp_path):
    folder = write_run(tmp_path / "run", "patch", heads={"layer": [0]})
    with pytest.raises(RunError, match=r"is a run of patch, which keeps no .*sink-lens trace"):
        views.attention_heads(read_run(folder))


TEXT = "the cat and the dog saw the river"


def test_a_model_and_a_text_are_enough_and_show_what_a_capture_has():
    lens = speaking()
    whole = capture(lens, [TEXT], sites=["pattern", "neurons"])
    chosen = views.attention_patterns(lens, TEXT, heads=[(2, 1), (0, 3)])
    assert chosen.props["headLabels"] == ["L2.H1", "L0.H3"]
    assert chosen.props["attention"] == pytest.approx(
        np.stack(
            [whole["pattern", 2][0, 1].float().numpy(), whole["pattern", 0][0, 3].float().numpy()]
        )
    )
    assert [text.strip() for text in chosen.props["tokens"]][-1].endswith("r")
    of_layer = views.attention_heads(lens, TEXT, layers=[1])
    assert of_layer.props["attentionHeadNames"] == [f"L1.H{head}" for head in range(lens.n_heads)]
    to_first = {
        f"L{layer}.H{head}": float(whole["pattern", layer][0, head, 1:, 0].mean())
        for layer in range(lens.n_layers)
        for head in range(lens.n_heads)
    }
    ranked = sorted(to_first, key=lambda name: -to_first[name])
    assert views.attention_heads(lens, TEXT).props["attentionHeadNames"] == [
        *ranked[:6],
        *ranked[-2:],
    ]


def test_a_neuron_is_shown_over_the_tokens():
    lens = speaking()
    view = views.neuron_activations(lens, TEXT, layer=1, neurons=[3, 0])
    values = capture(lens, [TEXT], sites=["neurons"], layers=[1])["neurons", 1][0].float().numpy()
    assert view.props["activations"][:, 0] == pytest.approx(values[:, [3, 0]])
    assert view.props["secondDimensionLabels"] == ["L1.N3", "L1.N0"]
    assert data(view.html)[0] == "TextNeuronActivations"
    largest = views.neuron_activations(lens, TEXT, layer=-1).props["activations"]
    assert np.abs(largest).max() == np.abs(largest[:, 0, 0]).max()
    with pytest.raises(InputError, match="neuron 100000"):
        views.neuron_activations(lens, TEXT, layer=1, neurons=[100_000])
    with pytest.raises(InputError, match="without a text"):
        views.attention_patterns(lens)
