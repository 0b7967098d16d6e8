"""The whole trace on tiny models: run folders, the planted truth, resuming, refusals."""

import functools
import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import safetensors.numpy
import torch
from evidences import random_batch
from lenses import lens_of, speaking
from rich.console import Console

from sink_lens import schema
from sink_lens.chain import amplification, interventions, mediate
from sink_lens.chain import trace as tracing
from sink_lens.chain.config import TraceConfig
from sink_lens.chain.interventions import TABLES as CAUSAL_TABLES
from sink_lens.chain.links import LINKS
from sink_lens.chain.page.story import ablation_sample_text, headline_numbers
from sink_lens.chain.summary import too_short_sentence
from sink_lens.chain.terminal import answer_of_trace, brief_answer
from sink_lens.chain.trace import FILES, trace
from sink_lens.errors import InputError, KernelError, ModelError
from sink_lens.models.load import wrap
from sink_lens.models.tiny import BOS_ID, planted, tiny_tokenizer
from sink_lens.records import default_run_folder, read_run
from tests.tiny_families import TINY_FAMILIES, tiny
from tests.zoo import build

KEYS = {
    "tokens": ["sequence", "position"],
    "heads": ["layer", "head", "sink_position"],
    "random_init_heads": ["layer", "head", "sink_position"],
    "positions": ["layer", "site", "position"],
    "neurons": ["layer", "neuron", "sink_position"],
    "dimensions": ["layer", "sink_position", "dimension"],
    "key_split": ["layer"],
    "growth_steps": ["step"],
    "conditions": ["condition"],
    "links": ["link", "statistic", "null_name"],
    "summary": ["quantity"],
    "amplification": ["centre", "factor"],
    "effects": ["link", "edit"],
    "mediation": ["intervention", "frozen", "step"],
    "placement": ["position", "token", "isolated"],
}
CHAIN = ("variance_neurons", "neurons_dimension", "dimension_key", "key_sink")


@functools.cache
def planted_lens(sink=True, seed=0):
    return wrap(planted(seed=seed, sink=sink).model, tokenizer=tiny_tokenizer(adds_bos=True))


def interrupt(*args, **options):
    raise KeyboardInterrupt


def asked(**changes):
    given = {
        "model": "tiny",
        "tokens": "random",
        "sequences": 5,
        "length": 20,
        "interventions": False,
    }
    return TraceConfig(**(given | changes))


def run(lens, out, *, batch=None, report=False, links=LINKS, **changes):
    """A trace; its report is not drawn, which takes seconds, unless it is asked for."""
    return trace(
        lens,
        config=asked(**changes),
        tokens=batch,
        out=out,
        progress=False,
        report=report,
        links=links,
    )


def check_folder(folder):
    """A finished run, whose tables have each key once."""
    found = read_run(folder)
    assert (found.status, found.missing, found.kind) == ("finished", [], "trace")
    tables = found.tables.cached_copy()  # their columns and types are checked as they are written
    for name, key in KEYS.items():
        if name in tables:
            assert not tables[name].duplicated(key).any(), name
            assert tables[name][key].notna().all(axis=None), name
    assert set(tables["links"]["verdict"]) <= {*schema.VERDICTS} - {"mixed", "not measured"}
    assert (tables["links"].query("is_primary").groupby("link")["statistic"].nunique() == 1).all()
    return found


def text_of(renderable):
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_every_family_is_traced_to_the_end(family, tmp_path):
    lens = speaking(family)
    result = run(lens, tmp_path / "run")
    found = check_folder(tmp_path / "run")
    assert not (tmp_path / "run" / "report.html").exists()
    assert len(found.tables["heads"]) == 3 * 4 * len(result.location.sink_positions)
    summary = found.tables["summary"].set_index("quantity")[
        "value"
    ]  # sequences without the sink there are left out
    studied = summary.get("sequences_with_sink", 5 - int(summary.get("sequences_elsewhere", 0)))
    assert len(found.tables["tokens"]) == 20 * int(studied)
    assert found.tables["conditions"]["condition"].tolist() == ["without", "with"]
    assert (found.tables["links"]["null_name"] == "random_init").any()
    pattern = found.tensors("patterns")["pattern"]
    assert (pattern.shape, pattern.dtype) == ((3, 4, 20, 20), np.uint8)
    assert np.array_equal(np.triu(pattern, 1), np.zeros_like(pattern))
    assert text_of(brief_answer(result))


def test_the_floor_of_the_advantage_is_that_of_the_mean_length(tmp_path):
    batch = random_batch(4, 40, first=BOS_ID, lengths=[40, 12, 12, 12])
    links = run(wrap(planted().model), tmp_path / "run", batch=batch, random_init=False).links
    (said,) = links.loc[links["link"].eq("key_sink"), "criterion"].unique()
    assert f"is above {LINKS[-1].floor(asked(), 19, 0):.3g}" in said


def test_without_growth_and_without_neurons_the_report_is_drawn_and_their_table_is_typed(tmp_path):
    result = run(speaking("gpt_oss"), tmp_path / "run", sequences=1, random_init=False)
    page = tmp_path / "run" / "report.html"
    assert not page.exists()
    assert result.report() == page
    assert page.stat().st_size > 10_000
    assert check_folder(tmp_path / "run").tables["neurons"].empty


def test_half_precision_is_traced(tmp_path):
    lens = wrap(tiny("llama").to(torch.bfloat16), tokenizer=tiny_tokenizer())
    found = run(lens, tmp_path / "run")
    assert check_folder(tmp_path / "run").provenance["dtype"] == "bfloat16"
    rows = found.tables["summary"].set_index("quantity")
    assert 0 < float(rows.loc["rounding", "value"]) < 0.1
    assert "in bfloat16 the logits at position" in rows.loc["rounding", "note"]


def test_the_planted_chain_is_found(tmp_path):
    truth = planted(seed=1)
    result = run(planted_lens(seed=1), tmp_path / "run", sequences=8, length=24)
    assert result.location.sink_positions == (0,)
    assert result.location.sink_found
    steps = [(step.first_layer, step.last_layer, step.dimension) for step in result.location.steps]
    assert steps == [(truth.layer, truth.layer, truth.outlier_dimension)]
    supers = result.super_neurons
    assert supers[["layer", "neuron"]].to_numpy().tolist() == [[truth.layer, truth.neuron]]
    links = result.links.groupby("link")[["measured", "intervened", "verdict"]].first()
    for name in CHAIN:
        assert links.loc[name].tolist() == ["present", "no intervention", "present, not tested"], (
            name
        )
    assert not {path.stem for path in result.folder.iterdir()} & {*CAUSAL_TABLES, "centring_means"}
    assert result.tables["growth_steps"]["split_error"].max() < 1e-4
    check_folder(tmp_path / "run")
    split = result.tables["key_split"]
    value_of = result.links.drop_duplicates("statistic").set_index("statistic")["value"]
    assert split["key_cosine_sink"].mean() == pytest.approx(value_of["key_cosine"], rel=1e-4)
    mass = result.tables["heads"].groupby("layer")["sink_mass"].mean()
    read = mass.index[mass >= mass.max() / 2]  # the statistic is of the layers that have the sink
    over = split.set_index("layer").loc[read, "logit_advantage_sink"]
    assert over.mean() == pytest.approx(value_of["logit_advantage_nats"], rel=1e-4)
    share = (
        split["dimension"].mean() / split[["dimension", "rest", "bias"]].dropna().sum(axis=1).mean()
    )
    assert share == pytest.approx(value_of["dimension_share_of_logit"], rel=1e-3)
    assert "Position 0 is the attention sink" in text_of(brief_answer(result))
    assert answer_of_trace(result)["sentence"].startswith("Position 0 is the attention sink")


def test_nothing_is_found_where_nothing_was_planted(tmp_path, caplog):
    caplog.set_level("INFO", logger="sink_lens")
    result = run(planted_lens(sink=False), tmp_path / "run", sequences=8, length=24)
    assert not result.location.sink_found
    assert result.location.sink_positions == (0,)
    assert result.location.steps == ()
    assert result.super_neurons.empty
    links = result.links.groupby("link")[["measured", "verdict"]].first()
    assert links.loc[[*CHAIN], "measured"].tolist() == ["absent"] * 4
    assert set(links["verdict"]) == {"not applicable"}  # there is no sink to lead to
    check_folder(tmp_path / "run")
    assert "No position is an attention sink" in text_of(brief_answer(result))
    assert (
        "no attention sink so far: position 1 comes nearest, with one in 1% of heads on all 8 seq"
        in caplog.text
    )


def test_the_first_answer_is_of_eight_sequences_and_comes_before_anything_else_is_measured(
    tmp_path, caplog, monkeypatch
):
    caplog.set_level("INFO", logger="sink_lens")
    monkeypatch.setattr("sink_lens.chain.measure.measure", None)
    with pytest.raises(TypeError, match="NoneType"):
        run(planted_lens(), tmp_path / "run", sequences=12, length=72, random_init=False)
    (said,) = [
        record.getMessage()
        for record in caplog.records
        if "sink at position" in record.getMessage()
    ]
    assert said.startswith(
        "after the first 64 tokens of 8 of 12 sequences: attention sink at position 0, in "
    )


def test_a_first_answer_that_all_sequences_contradict_is_corrected(tmp_path, caplog):
    caplog.set_level("INFO", logger="sink_lens")
    lens, batch = planted_lens(), random_batch(sequences=32, length=24)
    batch.tokens[8:, 0] = lens.tokenizer.bos_token_id
    run(lens, tmp_path / "run", batch=batch, random_init=False)
    first, second = (
        record.getMessage() for record in caplog.records if "attention sink" in record.getMessage()
    )
    assert first.startswith("after 8 of 32 sequences: no attention sink so far: position ")
    assert second.startswith("attention sink at position 0, in ")
    assert "of heads on all 32 sequences" in second


def test_the_sink_goes_with_bos_and_the_first_answer_has_the_rate_of_the_summary(tmp_path, caplog):
    caplog.set_level("INFO", logger="sink_lens")
    result = run(planted_lens(), tmp_path / "run", sequences=8, length=24, random_init=False)
    rate = float(result.tables["summary"].set_index("quantity").loc["sink_rate", "value"])
    assert f"attention sink at position 0, in {rate:.0%} of heads on all 8 sequences" in caplog.text
    conditions = result.tables["conditions"].set_index("condition")
    assert conditions["chosen"].to_dict() == {"with": True, "without": False}
    assert conditions.loc["with", "sink_rate"] > 0.2
    assert conditions.loc["without", "sink_rate"] < 0.05
    assert conditions.loc["with", "outlier_dimensions"] == str(planted().outlier_dimension)
    assert conditions.loc["without", "outlier_dimensions"] == ""


def test_every_table_but_the_arms_is_of_the_chosen_arm(tmp_path):
    result = run(
        planted_lens(), tmp_path / "run", sequences=8, length=24, bos="without", random_init=False
    )
    assert result.tables["conditions"]["condition"].tolist() == ["without", "with"]
    assert result.tables["conditions"]["chosen"].tolist() == [True, False]
    assert not result.location.sink_found
    assert (result.tables["tokens"].query("position == 0")["token_id"] != planted().bos_id).all()
    assert read_run(tmp_path / "run").provenance["bos_condition"] == "without"


def test_without_a_tokenizer_there_is_one_arm(tmp_path):
    result = run(lens_of("llama"), tmp_path / "run")
    assert result.tables["conditions"]["condition"].tolist() == ["without"]


def test_prompts_of_unequal_length_are_padded(tmp_path):
    prompts = (
        "the cat sat on the mat and then it sat on the hat",
        "one two",
        "all is well that ends well and so on",
    )
    result = run(speaking("llama"), tmp_path / "run", tokens="text", prompts=prompts)
    found = check_folder(tmp_path / "run")
    lengths = found.tables["tokens"].groupby("sequence").size().tolist()
    assert len(set(lengths)) == 3
    assert result.location.sink_position < min(lengths)
    assert found.config["prompts"] == list(prompts)


@pytest.mark.parametrize("length", [2, 7, 8, 9])
def test_short_sequences_are_undefined_not_wrong(length, tmp_path):
    result = run(speaking("llama"), tmp_path / "run", length=length, sequences=3, random_init=False)
    check_folder(tmp_path / "run")
    summary = result.tables["summary"].set_index("quantity")
    if length < 8:
        assert pd.isna(summary.loc["sink_rate", "value"])
        assert "too short to tell" in text_of(brief_answer(result))
    if length < 9:
        assert "fails" not in set(
            result.links.loc[result.links["link"] == "variance_neurons", "verdict"]
        )
        assert result.tables["layers"]["norm_ratio"].isna().all()


@pytest.mark.parametrize(
    ("threshold", "length", "needed"), [(0.1, 40, "44 tokens"), (0.05, 80, "117 tokens")]
)
def test_uniform_attention_at_a_low_threshold_is_no_sink(threshold, length, needed, tmp_path):
    lens = replace(wrap(tiny("llama", initializer_range=1e-4)), tokenizer=tiny_tokenizer())
    given = {"threshold": threshold, "length": length, "sequences": 2}
    result = run(lens, tmp_path / "run", **given, random_init=False, interventions=False)
    assert not result.location.sink_found
    assert pd.isna(result.tables["summary"].set_index("quantity").loc["sink_rate", "value"])
    assert needed in too_short_sentence(threshold)
    assert "too short to tell" in text_of(brief_answer(result))


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "olmo2"])
def test_one_repeated_token_has_no_sink_under_rotary_positions(family, tmp_path):
    repeated = run(
        speaking(family), tmp_path / "run", tokens="repeated", bos="without", random_init=False
    )
    assert repeated.tables["conditions"].loc[0, "sink_rate"] == 0.0
    assert not repeated.location.sink_found
    # every position holds the same state, so that nothing sets position 0 apart
    assert repeated.tables["layers"]["norm_ratio"].to_numpy() == pytest.approx(1.0, abs=1e-4)
    assert repeated.tables["conditions"].loc[0, "s2_ratio"] == pytest.approx(1.0, abs=1e-4)


def test_the_default_folder_is_named_after_model_and_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert default_run_folder("org/My Model.gguf").parent == Path("runs")
    assert default_run_folder("org/My Model.gguf").name.startswith("My-Model.gguf-20")
    names = set()
    for _ in range(3):  # within a second or not
        folder = default_run_folder("m")
        folder.mkdir(parents=True)
        names.add(folder.name)
    assert len(names) == 3


@pytest.fixture(scope="module")
def cut_whole(tmp_path_factory):
    """A finished trace of the planted model with all interventions."""
    return cut_run(tmp_path_factory.mktemp("intervened") / "run")


def cut_run(out):
    return run(
        planted_lens(), out, sequences=6, length=24, random_init=False, interventions=True, intervention_sequences=4,
        intervention_length=16,
    )  # fmt: skip


def test_the_cuts_are_files_of_the_run(cut_whole):
    folder = cut_whole.folder
    found = check_folder(folder)
    names = {path.stem for path in folder.iterdir()}
    assert names == {*FILES, *CAUSAL_TABLES, "centring_means", "location", "plan", "run"}
    for name in CAUSAL_TABLES:
        assert found.tables[name].columns.tolist() == schema.column_names("trace", name)
        pd.testing.assert_frame_equal(found.tables[name], cut_whole.tables[name], check_dtype=False)
    means = found.tensors("centring_means")
    assert set(means) == {
        f"{centre}.{layer}" for centre in ("values", "aggregated") for layer in range(3)
    }  # those that are amplified
    assert means["values.0"].shape == (4, 12)


def test_the_planted_links_hold_measured_and_cut(cut_whole):
    links = cut_whole.links.groupby("link")[["measured", "intervened", "verdict"]].first()
    for name in CHAIN:
        assert links.loc[name].tolist() == ["present", "holds", "holds"], name
    assert (
        links.loc["aggregation_variance", "intervened"] == "fails"
    )  # its sink is a token, no variance
    assert links.loc["aggregation_variance", "verdict"] == "fails"
    assert (cut_whole.links["statistic"] == "intervention_share").sum() == 6
    said = text_of(brief_answer(cut_whole))
    assert said.startswith("Position 0 is the attention sink (")
    lines = said.splitlines()
    assert len(lines) <= 30
    verdicts = cut_whole.links.drop_duplicates("link").set_index("link")["verdict"]
    assert [sum(f" {verdict} " in line for line in lines) for verdict in ("holds", "fails")] == [
        (verdicts == verdict).sum() for verdict in ("holds", "fails")
    ]
    assert "removes" in said


def test_a_run_stopped_within_its_cuts_and_after_them_is_continued_and_ends_equal(
    tmp_path, monkeypatch, cut_whole
):
    with monkeypatch.context() as patch:
        patch.setattr(mediate, "mediation_table", interrupt)
        with pytest.raises(KeyboardInterrupt):
            cut_run(tmp_path / "run")
    stopped = read_run(tmp_path / "run")
    assert (stopped.status, stopped.missing) == (
        "interrupted",
        ["links", "summary", "mediation", "paths", "placement"],
    )
    with monkeypatch.context() as patch:
        patch.setattr(
            interventions, "intervention_table", interrupt
        )  # finished: must not be made again
        patch.setattr(amplification, "amplification_curve", interrupt)
        patch.setattr(tracing, "link_table", interrupt)
        with pytest.raises(KeyboardInterrupt):
            cut_run(tmp_path / "run")
    monkeypatch.setattr(
        interventions, "make_setting", interrupt
    )  # all cuts are done: none is run again
    again = cut_run(tmp_path / "run")
    assert set(again.tables) == set(cut_whole.tables)
    for name, table in again.tables.items():
        pd.testing.assert_frame_equal(table, cut_whole.tables[name], check_exact=True, obj=name)
    means, wanted = (read_run(one.folder).tensors("centring_means") for one in (again, cut_whole))
    assert set(means) == set(wanted)
    assert all(np.array_equal(means[name], wanted[name]) for name in means)


def test_sequences_too_short_to_cut_are_warned_about_and_measured(tmp_path):
    with pytest.warns(
        UserWarning, match="no intervention is made: the shortest sequence has 10 tokens"
    ):
        result = run(
            speaking("llama"),
            tmp_path / "run",
            sequences=3,
            length=10,
            random_init=False,
            interventions=True,
        )
    found = check_folder(tmp_path / "run")
    assert all(found.tables[name].empty for name in CAUSAL_TABLES)
    assert not {"holds", "fails"} & {*result.links["verdict"]}
    assert set(result.links["intervened"]) == {"no intervention"}
    assert text_of(brief_answer(result))


def test_what_cannot_be_traced_is_refused_and_leaves_nothing(tmp_path):
    (tmp_path / "short.txt").write_text("Call me Ishmael.")
    short = {"tokens": "text", "text": str(tmp_path / "short.txt")}
    for error, text, lens, changes in (
        (
            InputError,
            "length is 257 tokens; .* takes at most 256",
            speaking("llama"),
            {"length": 257},
        ),
        (
            InputError,
            "has no tokenizer, so no text can be read; need one",
            lens_of("llama"),
            {"tokens": "text"},
        ),
        (InputError, r"the text 'short.txt' has \d+ tokens; need 5 x 20", speaking("llama"), short),
        (InputError, "there is no BOS token", lens_of("llama"), {"bos": "with"}),
        (KernelError, "Use kernel='eager'", speaking("gemma2"), {"kernel": "fused"}),
    ):
        with pytest.raises(error, match=text):
            run(lens, tmp_path / "run", **changes)
    with pytest.raises(ModelError, match="no-such-model"):
        trace(tmp_path / "no-such-model", config=asked(), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "given", "studied", "left_out"),
    [("elsewhere", 16, 14, "sequences_elsewhere"), ("delimiter", 14, 10, "sequences_uncut")],
)
def test_sequences_that_are_left_out_are_counted_and_no_number_is_said_to_be_of_them(
    name, given, studied, left_out
):
    zoo = build(name, seed=0, family="llama")
    tokens = zoo.draw(given, length=40, generator=torch.Generator().manual_seed(0))
    found = trace(
        wrap(zoo.model),
        tokens,
        interventions=False,
        intervention_sequences=studied,
        random_init=False,
        progress=False,
        report=False,
    )
    assert found.links["n"].max() == studied
    assert f"in {studied} sequences" in headline_numbers(found.run)[0][1]
    row = found.tables["summary"].set_index("quantity").loc[left_out]
    assert int(row["value"]) == given - studied
    assert f"of {given} sequences" in row["note"]
    assert re.search(rf"\b{given - studied}\b", found.headline.partition("\n")[0])
    assert "that were used" in ablation_sample_text(found.run)  # all that are left are tested


def test_patterns_are_those_of_the_first_sequence(tmp_path):
    batch = random_batch(3, 12, lengths=[9, 12, 12])
    run(speaking("gpt2"), tmp_path / "run", batch=batch, random_init=False)
    pattern = safetensors.numpy.load_file(tmp_path / "run" / "patterns.safetensors")["pattern"]
    assert pattern.shape == (3, 4, 9, 9)  # its real positions only
    eager = tiny("gpt2", attn_implementation="eager")
    with torch.no_grad():
        expected = eager(batch.tokens[:1, :9], output_attentions=True).attentions
    assert np.abs(pattern / 255 - torch.cat(expected).numpy()).max() < 0.5 / 255 + 1e-4


def test_token_ids_are_traced_as_their_batch_is(tmp_path):
    batch = random_batch(sequences=5, length=20)
    options = {"interventions": False, "random_init": False}
    ids = run(planted_lens(), tmp_path / "ids", batch=batch.tokens, **options)
    same = run(planted_lens(), tmp_path / "batch", batch=batch, **options)
    assert ids.tables["tokens"].equals(same.tables["tokens"])
    assert ids.location.sink_position == same.location.sink_position


def test_text_is_cut_from_a_file(tmp_path):
    (tmp_path / "book.txt").write_text("It was the best of times, it was the worst of times. " * 40)
    book = {"tokens": "text", "text": str(tmp_path / "book.txt")}
    run(speaking("llama"), tmp_path / "run", sequences=3, length=16, random_init=False, **book)
    assert read_run(tmp_path / "run").provenance["token_source"] == "text:book.txt"


def test_sequences_that_are_rotated_otherwise_than_their_parts_are_refused():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
    rope |= {"short_factor": [1.0] * 6, "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 16.0]}
    more = {"sliding_window": None, "original_max_position_embeddings": 16}
    lens = wrap(tiny("phi3", **more, rope_parameters=rope))
    with pytest.raises(InputError, match=r"40 tokens, and .* rotates those over 16 otherwise"):
        trace(lens, tokens=random_batch(2, 40))
