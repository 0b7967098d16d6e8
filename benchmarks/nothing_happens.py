"""What is said where nothing happens: of weights that never change, a model beside itself, and random answers.

    python -m benchmarks.nothing_happens --kind alarms --runs 300   # goes on where it stopped
    python -m benchmarks.nothing_happens --kind training --first 1000 --runs 5   # with a sink
    python -m benchmarks.nothing_happens                            # nothing_happens.md, from the rows

Each run is a row of ``nothing_happens.csv``: *said* is True if a headline or an alarm says that something happens.

- ``alarms``: a small Llama with random weights, its queries times 1, 4 or 16, reads 24 batches of random tokens in one
  of six distributions of lengths. Said: the alarm of that rule.
- ``training``: a byte-level Llama of one layer is trained on the bundled prose with lengths of 24 to 64; its sink rate
  on 64 other sequences stays under 5%. Said: a birth. From seed 1,000 on, the loss draws attention to a BOS from step
  40 on, and the alarm is right at most two readings from the first from which that rate stays at 5% or more.
- ``card``: a random model compared with itself, with its neurons in another order. Said: a change.
- ``sweep``, ``patch``, ``patch_stream``: a random model (one layer; two for the stream) on 16 random prompts or pairs,
  whose right and wrong answers are drawn at random. Said: an edit that counts, a patch that moves the metric most, a
  position that carries it.
- ``circuit``: a random model of one layer on 32 random pairs with random answers. Said: a circuit of the pairs that it
  gets right.
- ``quantise``: a random model on random tokens, which no format makes worse. Said: a set to keep.
"""

import argparse
import copy
import csv
import json
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.monitor_births import birth_of
from benchmarks.rewrites import permuted_neurons
from sink_lens import TokenBatch, circuits
from sink_lens.data.corpora import bundled_text
from sink_lens.edits.metrics import logit_difference
from sink_lens.errors import InputError
from sink_lens.models.load import wrap
from sink_lens.models.tiny import tiny_tokenizer
from sink_lens.patching import patch
from sink_lens.patching.page import PATCH
from sink_lens.records import read_run
from sink_lens.schema import MIN_SINK_RATE
from sink_lens.stats import wilson_interval
from sink_lens.studies import card, quantise
from sink_lens.sweeps import EditGrid, Grid, sweep
from sink_lens.training import SinkMonitor
from sink_lens.training.monitor_alarms import RULES

ROWS, TABLE = (Path(__file__).with_name(f"nothing_happens.{ending}") for ending in ("csv", "md"))
COLUMNS = ("kind", "variant", "seed", "said", "text")
VOCAB, BORN = 300, 1_000
WITH_SINK = "byte-level, with a sink"
Row = tuple[str, bool, str]
"""Variant, whether something was said, and the text."""


def model_of(seed: int, *, layers: int, sharp: float = 1.0, width: int = 48) -> LlamaForCausalLM:
    """A random Llama; ``sharp`` multiplies its queries."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCAB,
                hidden_size=width,
                intermediate_size=2 * width,
                num_hidden_layers=layers,
                num_attention_heads=4,
                num_key_value_heads=4,
                max_position_embeddings=128,
            )
        )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name:
                weight.mul_(
                    sharp * 20
                )  # the library's initial weights are so small that attention is uniform
            elif "norm" not in name:
                weight.mul_(5)
    return model.eval()


def lengths_of(name: str, step: int, draw: torch.Generator) -> list[int]:
    """The lengths of the 8 sequences of a batch."""
    uniform = lambda low, high, n: torch.randint(low, high + 1, (n,), generator=draw).tolist()  # noqa: E731
    if name == "8 to 40":
        return uniform(8, 40, 1) * 8
    if name == "16 to 64":
        return uniform(16, 64, 1) * 8
    if name == "18 or 64":
        return [(18, 64)[uniform(0, 1, 1)[0]]] * 8
    if name == "growing":
        return [16 + 2 * step] * 8
    if name == "one long in ten":
        return [64 if uniform(0, 9, 1)[0] == 0 else 20] * 8
    return uniform(8, 64, 8)  # padded


LENGTHS = ("8 to 40", "16 to 64", "18 or 64", "growing", "one long in ten", "padded")


def alarms(seed: int) -> Iterator[Row]:
    """Weights that never change: one run in each rule."""
    name = LENGTHS[seed % len(LENGTHS)]
    draw = torch.Generator().manual_seed(seed)
    model = model_of(seed, layers=2, sharp=(1.0, 4.0, 16.0)[seed // len(LENGTHS) % 3])
    with SinkMonitor(model, every=1) as monitor:
        for step in range(24):
            lengths = torch.tensor(lengths_of(name, step, draw))
            tokens = torch.randint(3, VOCAB, (8, int(lengths.max())), generator=draw)
            mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
            model(input_ids=tokens, **({} if mask.all() else {"attention_mask": mask}))
            monitor.step()
    for rule in RULES:
        found = [one.sentence for one in monitor.alarms if one.rule == rule.name]
        yield f"{rule.name}, lengths {name}", bool(found), " | ".join(found)


def training(seed: int) -> Iterator[Row]:
    """A byte-level training, and the alarm of a birth beside the truth."""
    data = torch.tensor(list(bundled_text().encode()), dtype=torch.long)
    draw, born = torch.Generator().manual_seed(seed), seed >= BORN

    def rows(n: int, length: int) -> torch.Tensor:
        starts = torch.randint(0, len(data) - length, (n,), generator=draw)
        found = torch.stack([data[one : one + length] for one in starts.tolist()])
        if born:
            found[:, 0] = VOCAB - 1  # BOS
        return found

    model, apart = model_of(seed, layers=1).train(), rows(64, 48)
    model.set_attn_implementation("eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 if born else 1e-3)
    rates = []
    with (
        SinkMonitor(model, every=10) as monitor,
        SinkMonitor(model, every=10, tokens=apart) as truth,
    ):
        for step in range(120):
            tokens = rows(16, int(torch.randint(24, 65, (), generator=draw)))
            found = model(input_ids=tokens, labels=tokens, output_attentions=True)
            drawn = found.attentions[0][..., 8:, 0].log().mean() if born and step >= 40 else 0.0
            (found.loss - drawn).backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step()
            if (reading := truth.step()) is not None:
                rates.append({"step": step, "true_rate": reading["sinks/rate_first"]})
    alarms = [one for one in monitor.alarms if one.rule == "sink_born"]
    frame = pd.DataFrame(rates)
    largest, birth = float(frame["true_rate"].to_numpy().max()), birth_of(frame)
    text = f"largest rate {largest:.3f}, birth {birth} | " + " | ".join(
        one.sentence for one in alarms
    )
    if largest >= MIN_SINK_RATE:
        yield (
            WITH_SINK,
            any(birth is not None and abs(one.step - birth) <= 20 for one in alarms),
            text,
        )
    else:
        yield "byte-level, without a sink", bool(alarms), text


def card_of_itself(seed: int) -> Iterator[Row]:
    """A model and its copy with permuted neurons, under two names, on the same sequences."""
    model, draw = model_of(seed, layers=2), torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCAB, (8, 32), generator=draw)
    copied = permuted_neurons(copy.deepcopy(model), draw)
    found = card(
        *(wrap(each, tokenizer=tiny_tokenizer()) for each in (model, copied)),
        tokens=TokenBatch.from_tensor(tokens), progress=False,
    )  # fmt: skip
    yield "with itself, neurons in another order", bool(found.decision["changes"]), found.headline


def shuffled(
    seed: int, *, layers: int = 1
) -> tuple[LlamaForCausalLM, torch.Tensor, torch.Tensor, torch.Generator]:
    """A random model, and 16 pairs of random prompts."""
    draw = torch.Generator().manual_seed(seed)
    clean = torch.randint(3, VOCAB, (16, 12), generator=draw)
    return (
        model_of(seed, layers=layers),
        clean,
        torch.randint(3, VOCAB, (16, 12), generator=draw),
        draw,
    )


def answers(draw: torch.Generator) -> tuple[list[int], list[int]]:
    """Right and wrong answers at random."""
    drawn = torch.randint(3, VOCAB, (2, 16), generator=draw).tolist()
    return drawn[0], drawn[1]


def swept(seed: int) -> Iterator[Row]:
    """Each head set to zero, with random directions of the same size as controls."""
    model, clean, _, draw = shuffled(seed)
    grid = Grid.of(EditGrid(kind="zero", site="z", layers=0, heads="each"), controls=5)
    metric = logit_difference(*answers(draw))
    found = sweep(
        wrap(model), grid, tokens=TokenBatch.from_tensor(clean), metrics=[metric], progress=False
    )
    title = found.headline.partition(".\n")[0]
    yield "heads, random answers", not title.startswith(("None of", "No ")), title


def patched(seed: int) -> Iterator[Row]:
    """Patch attention's output at each position, between prompts whose answers are random."""
    title = title_of_patches(seed, site="attn_out", layers=1)
    yield "attention by position, random answers", "no patch is shown" not in title, title


def patched_stream(seed: int) -> Iterator[Row]:
    """The stream, patched at each layer and position, between prompts whose answers are random."""
    title = title_of_patches(seed, site="resid_pre", layers=2)
    yield "by layer and position, random answers", "no patch is shown" not in title, title


def title_of_patches(seed: int, *, site: str, layers: int) -> str:
    """The title of a patch's page."""
    model, clean, corrupted, draw = shuffled(seed, layers=layers)
    found = patch(
        wrap(model), clean, corrupted, site=site, by=("layer", "position"), metric=logit_difference(*answers(draw)),
        controls=0, progress=False,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        return PATCH.title(read_run(found.save(Path(folder) / "run")))


def circuit_of_chance(seed: int) -> Iterator[Row]:
    """Find the circuit of random pairs; the model gets some of them right."""
    draw = torch.Generator().manual_seed(seed)
    letters = [
        chr(one) for one in torch.randint(97, 123, (32, 12), generator=draw).flatten().tolist()
    ]
    words = iter(".".join(letters[at : at + 6]) for at in range(0, len(letters), 6))
    pairs = [{"clean": clean, "corrupted": next(words)} for clean in words]
    for pair in pairs:
        right, wrong = torch.randperm(26, generator=draw)[:2].tolist()
        pair |= {"correct": chr(97 + right), "incorrect": chr(97 + wrong)}
    lens = wrap(model_of(seed, layers=1), tokenizer=tiny_tokenizer())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pairs.jsonl"
        file.write_text("\n".join(map(json.dumps, pairs)))
        try:
            found = circuits.run(
                lens, task="file", pairs_file=str(file), pairs=32, progress=False, report=False
            )
        except InputError as refused:
            text = str(refused)
        else:
            text = found.headline
    said = not any(
        one in text for one in ("chance", "does not do", "covers 0", "Faithfulness is undefined")
    )
    yield "random pairs and answers", said, text.partition(". All other edges")[0]


def quantised(seed: int) -> Iterator[Row]:
    """Quantise a model on random tokens: their loss is that of a guess, so no format can cost anything."""
    tokens = TokenBatch.from_tensor(
        torch.randint(3, VOCAB, (16, 32), generator=torch.Generator().manual_seed(seed))
    )
    form = ("int8_tensor", "int4_token")[seed % 2]
    found = quantise(wrap(model_of(seed, layers=2)), tokens=tokens, format=form, progress=False)
    yield "random tokens", found.decision["verdict"] != "nothing to keep", found.headline


KINDS: dict[str, Callable[[int], Iterator[Row]]] = {
    "alarms": alarms,
    "training": training,
    "card": card_of_itself,
    "sweep": swept,
    "patch": patched,
    "patch_stream": patched_stream,
    "circuit": circuit_of_chance,
    "quantise": quantised,
}


def go_on(kind: str, seeds: range) -> None:
    """Make the runs of a kind that are not in the file, and append their rows."""
    done = set(pd.read_csv(ROWS).query("kind == @kind")["seed"]) if ROWS.exists() else set()
    logging.disable(logging.WARNING)
    for seed in sorted(set(seeds) - done):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows = [
                (kind, what, seed, said, text if said else text[:60])
                for what, said, text in KINDS[kind](seed)
            ]
        new = not ROWS.exists()
        with ROWS.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerows([COLUMNS, *rows] if new else rows)


def table() -> str:
    """The table of the documentation: what was run, how often something was said, and the upper end of the interval."""
    lines = [
        "| where nothing happens | runs | something is said | at most (95%) |",
        "| --- | --- | --- | --- |",
    ]
    frame = pd.read_csv(ROWS)
    frame["what"] = frame["kind"] + ": " + frame["variant"].str.partition(", lengths")[0]
    births = frame["variant"].eq(WITH_SINK)
    for what, rows in frame.loc[~births].groupby("what", sort=False):
        n, said = len(rows), int(rows["said"].sum())
        lines.append(
            f"| {what} | {n} | {said} ({said / n:.1%}) | {wilson_interval(said, n)[1]:.1%} |"
        )
    if births.to_numpy().any():
        found = f"{frame.loc[births, 'said'].sum()} of {births.sum()}"
        lines += [
            "",
            f"In byte-level trainings with a sink, the alarm comes within two readings of the birth in {found}.",
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Go on with the runs of a kind, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=list(KINDS), nargs="+", default=[])
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="seed of the first run")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for kind in asked.kind:
        go_on(kind, range(asked.first, asked.first + asked.runs))
    TABLE.write_text(table(), encoding="utf-8")
    print(table())


if __name__ == "__main__":
    main()
