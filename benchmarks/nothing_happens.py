"""What is said where nothing happens: of weights that never change, a model beside itself, and random answers.

    python -m benchmarks.nothing_happens --kind alarms --runs 300   # goes on where it stopped
    python -m benchmarks.nothing_happens                            # nothing_happens.md, from the rows

Each run is a row of ``nothing_happens.csv``: *said* is True if a headline or an alarm says that something happens.

- ``alarms``: a small Llama with random weights, its queries times 1, 4 or 16, reads 24 batches of random tokens in one
  of six distributions of lengths. Said: the alarm of that rule.
- ``training``: a byte-level Llama of one layer is trained on the bundled prose with lengths of 24 to 64, without
  its first token in the loss, for so few steps that its sink rate on 64 other sequences stays under 5%. Said: a birth.
- ``card``: a random model compared with itself, saved and loaded again. Said: a change.
- ``sweep``, ``patch``: a random model of one layer on 16 random prompts or pairs, whose right and wrong answers are
  drawn at random. Said: an edit that counts, a patch that moves the metric most.
"""

import argparse
import copy
import csv
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sink_lens import TokenBatch
from sink_lens.data.corpora import bundled_text
from sink_lens.edits.metrics import logit_difference
from sink_lens.models.load import wrap
from sink_lens.models.tiny import tiny_tokenizer
from sink_lens.patching import patch
from sink_lens.patching.page import PATCH
from sink_lens.records import read_run
from sink_lens.schema import MIN_SINK_RATE
from sink_lens.stats import wilson_interval
from sink_lens.studies import card
from sink_lens.sweeps import EditGrid, Grid, sweep
from sink_lens.training import SinkMonitor
from sink_lens.training.monitor_alarms import RULES

ROWS, TABLE = (Path(__file__).with_name(f"nothing_happens.{ending}") for ending in ("csv", "md"))
COLUMNS = ("kind", "variant", "seed", "said", "text")
VOCAB = 300
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
                weight.mul_(sharp * 20)  # the library's initial weights are so small that attention is uniform
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
    with SinkMonitor(model, every=1) as monitor, torch.no_grad():
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
    """A byte-level training whose sink rate stays under that of a sink; one whose rate does not is another row."""
    data = torch.tensor(list(bundled_text().encode()), dtype=torch.long)
    draw = torch.Generator().manual_seed(seed)

    def rows(n: int, length: int) -> torch.Tensor:
        starts = torch.randint(0, len(data) - length, (n,), generator=draw)
        return torch.stack([data[one : one + length] for one in starts.tolist()])

    model, apart = model_of(seed, layers=1).train(), rows(64, 48)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rates = []
    with SinkMonitor(model, every=10) as monitor, SinkMonitor(model, every=10, tokens=apart) as truth:
        for _ in range(120):
            tokens = rows(16, int(torch.randint(24, 65, (), generator=draw)))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step()
            if (reading := truth.step()) is not None:
                rates.append(reading["sinks/rate_first"])
    found = [one.sentence for one in monitor.alarms if one.rule == "sink_born"]
    variant = "without a sink" if max(rates) < MIN_SINK_RATE else "with a sink"
    yield f"byte-level, {variant}", bool(found), f"largest rate {max(rates):.3f} | " + " | ".join(found)


def card_of_itself(seed: int) -> Iterator[Row]:
    """A model and its copy, under two names, on the same sequences."""
    model = model_of(seed, layers=2)
    tokens = torch.randint(3, VOCAB, (8, 32), generator=torch.Generator().manual_seed(seed))
    one, other = (wrap(each, tokenizer=tiny_tokenizer()) for each in (model, copy.deepcopy(model)))
    with tempfile.TemporaryDirectory() as folder:
        found = card(one, other, tokens=TokenBatch.from_tensor(tokens), out=Path(folder) / "run", progress=False)
    yield "with itself", bool(found.decision["changes"]), found.headline


def shuffled(seed: int) -> tuple[LlamaForCausalLM, torch.Tensor, torch.Tensor, torch.Generator]:
    """A random model of one layer, and 16 pairs of random prompts."""
    draw = torch.Generator().manual_seed(seed)
    clean = torch.randint(3, VOCAB, (16, 12), generator=draw)
    return model_of(seed, layers=1), clean, torch.randint(3, VOCAB, (16, 12), generator=draw), draw


def answers(draw: torch.Generator) -> tuple[list[int], list[int]]:
    """Right and wrong answers at random."""
    drawn = torch.randint(3, VOCAB, (2, 16), generator=draw).tolist()
    return drawn[0], drawn[1]


def swept(seed: int) -> Iterator[Row]:
    """Each head set to zero, with random directions of the same size as controls."""
    model, clean, _, draw = shuffled(seed)
    grid = Grid.of(EditGrid(kind="zero", site="z", layers=0, heads="each"), controls=5)
    metric = logit_difference(*answers(draw))
    found = sweep(wrap(model), grid, tokens=TokenBatch.from_tensor(clean), metrics=[metric], progress=False)
    title = found.headline.partition(".\n")[0]
    yield "heads, random answers", not title.startswith(("None of", "No ")), title


def patched(seed: int) -> Iterator[Row]:
    """The stream patched at each position, between prompts whose answers are random."""
    model, clean, corrupted, draw = shuffled(seed)
    found = patch(
        wrap(model), clean, corrupted, site="attn_out", by=("layer", "position"),
        metric=logit_difference(*answers(draw)), controls=0, progress=False,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        title = PATCH.title(read_run(found.save(Path(folder) / "run")))
    yield "attention by position, random answers", "no patch is shown" not in title, title


KINDS: dict[str, Callable[[int], Iterator[Row]]] = {
    "alarms": alarms,
    "training": training,
    "card": card_of_itself,
    "sweep": swept,
    "patch": patched,
}


def go_on(kind: str, runs: int) -> None:
    """Make the runs of a kind that are not in the file, and append a row for each."""
    done = set(pd.read_csv(ROWS).query("kind == @kind")["seed"]) if ROWS.exists() else set()
    logging.disable(logging.WARNING)
    for seed in sorted(set(range(runs)) - done):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows = [(kind, variant, seed, said, text) for variant, said, text in KINDS[kind](seed)]
        new = not ROWS.exists()
        with ROWS.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerows([COLUMNS, *rows] if new else rows)


def table() -> str:
    """The table of the documentation: what was run, how often something was said, and the upper end of the interval."""
    lines = ["| where nothing happens | runs | something is said | at most (95%) |", "| --- | --- | --- | --- |"]
    frame = pd.read_csv(ROWS)
    frame["what"] = frame["kind"] + ": " + frame["variant"].str.partition(", lengths")[0]
    for what, rows in frame.groupby("what", sort=False):
        n, said = len(rows), int(rows["said"].sum())
        lines.append(f"| {what} | {n} | {said} ({said / n:.1%}) | {wilson_interval(said, n)[1]:.1%} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Go on with the runs of a kind, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=list(KINDS), nargs="+", default=[])
    parser.add_argument("--runs", type=int, default=300)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for kind in asked.kind:
        go_on(kind, asked.runs)
    TABLE.write_text(table(), encoding="utf-8")
    print(table())


if __name__ == "__main__":
    main()
