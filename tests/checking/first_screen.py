"""Recompute what the first screen of a trace says, with transformers and torch alone.

    python tests/checking/first_screen.py RUN MODEL

RUN is the folder of a trace of MODEL, a folder of save_pretrained. From the run come the
sequences and what is claimed; attention, norms, ablations and placements are computed here again, from the definitions
in docs/chain.md and docs/evidence.md. It prints a line a claim, and ends with 1 if one is off by more than 0.005 (a
share, a mass) or one in a hundred (a norm, a rank). What is not recomputed is named at the end.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from by_hand import Run, isolating, put_units, run
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

FIRST_QUERIES = 8


def mass(run: Run, position: int, layers: list[int]) -> Tensor:
    """Mean attention of later queries to a position, over heads and layers, by sequence."""
    return run.pattern[layers][..., position + 1 :, position].mean((0, 2, 3))


def loss_of(run: Run, tokens: Tensor) -> float:
    return float(cross_entropy(run.logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()))


class Screen:
    """The claims of a run, and each again."""

    def __init__(self, folder: Path, model: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model).eval()
        self.folder, self.off, self.left = folder, 0, []
        rows = pd.read_parquet(folder / "tokens.parquet")
        table = rows.pivot(index="sequence", columns="position", values="token_id")
        self.tokens = torch.tensor(table.dropna(axis=1).to_numpy()).long()
        config = json.loads((folder / "run.json").read_text())["config"]
        self.config = config
        self.effects = pd.read_parquet(folder / "effects.parquet")
        n, count = len(self.tokens), min(config["intervention_sequences"], len(self.tokens))
        chosen = torch.linspace(0, n - 1, count).round().long().unique()
        self.some = self.tokens[chosen][:, : config["intervention_length"]]
        values = pd.read_csv(folder / "summary.csv").set_index("quantity")["value"]
        self.values, self.sink = values, int(float(values["sink_position"]))
        first = self.effects.iloc[0]
        self.reads = layers_of(first["read_layers"])
        self.target = int(first["position"])
        self.at_sink = torch.zeros_like(self.some, dtype=torch.bool)
        self.at_sink[:, self.sink] = True
        if int(first["sinks_left_out"]) != len(self.some):
            self.left.append("means, since other sinks than those at the studied position are left out of them")
        self.clean = run(self.model, self.some)
        self.had = mass(self.clean, self.sink, self.reads)

    def say(self, claim: str, said: float, again: float, *, relative: bool = False) -> None:
        wrong = abs(said - again) > (0.01 * abs(said) + 1e-6 if relative else 0.005)
        self.off += wrong
        sys.stdout.write(f"{'OFF ' if wrong else 'ok  '} {claim}: {said:.4f}, again {again:.4f}\n")

    def ablated(self, site: str, layer: int, part: Any = slice(None)) -> tuple:
        """The edit that puts the mean of the other tokens in the place of a part of a site, at the sink."""
        mean = self.clean.sites[site, layer][~self.at_sink].double().mean(0).float()
        return site, layer, put_units(self.at_sink, mean, part)

    def share_removed(self, edits: list) -> float:
        left = mass(run(self.model, self.some, edits=edits, reads=False), self.sink, self.reads)
        return float((self.had - left).mean() / self.had.mean())

    def where(self) -> None:
        whole = run(self.model, self.tokens)
        states = torch.stack([whole.sites["stream", layer] for layer in range(-1, len(whole.pattern))])
        score = whole.pattern[..., self.sink :, :].mean(-2)[..., self.sink]
        rate = (score > self.config["threshold"]).float().mean()
        self.say(f"sink rate at position {self.sink}", float(self.values["sink_rate"]), float(rate))
        norms = states.norm(dim=-1)
        rest = [p for p in range(8, norms.shape[-1]) if p != self.sink]
        ratio = (norms[..., self.sink] / norms[..., rest].median(-1).values).mean(-1)
        table = pd.read_parquet(self.folder / "layers.parquet")
        if "norm_ratio" in table:
            for layer, value in zip(table["layer"], table["norm_ratio"], strict=True):
                self.say(f"norm ratio after layer {layer}", float(value), float(ratio[int(layer) + 1]), relative=True)
        middle = len(whole.pattern) // 2
        for name, drop in (("effective_rank", False), ("effective_rank_without", True)):
            x = states[middle + 1]
            if drop:
                x = torch.cat([x[:, : self.sink], x[:, self.sink + 1 :]], 1)
            p = torch.linalg.svdvals(x.double())
            p = p / p.sum(-1, keepdim=True)
            again = torch.exp(-(p * p.clamp(min=1e-300).log()).sum(-1)).mean()
            self.say(name.replace("_", " "), float(self.values[name]), float(again), relative=True)

    def part(self, name: str) -> list:
        """The edits that ablate a part of a set of makers."""
        if found := re.fullmatch(r"(head )?(\d+)\.(\d+)", name):
            is_head, layer, unit = found[1], int(found[2]), int(found[3])
            if not is_head:
                return [self.ablated("neurons", layer, [unit])]
            size = self.clean.sites["z", layer].shape[-1] // self.model.config.num_attention_heads
            return [self.ablated("z", layer, slice(unit * size, (unit + 1) * size))]
        return [] if name.startswith("position") else [self.ablated("stream", -1)]

    def makers(self) -> None:
        sets = pd.read_parquet(self.folder / "maker_sets.parquet")
        for row in sets.loc[sets["control_of"].eq("")].drop_duplicates("parts").to_dict("records"):
            changes = [self.part(name) for name in row["parts"].split(", ")]
            if not all(changes) or row["target"] != "sink":
                self.left.append(f"{row['set']}: {row['parts']}")
                continue
            again = self.share_removed([one for some in changes for one in some])
            self.say(f"{row['set']} ({row['parts'][:60]})", row["removed"], again)

    def links(self) -> None:
        sites = {"mean ablation of attn_out": "attn_out", "mean ablation of the key": "k"}
        for row in self.effects.loc[self.effects["is_primary"]].to_dict("records"):
            name = f"{row['link']}: {row['edit']}"
            if row["edit"] == "isolation":
                alone = run(self.model, self.some, mask=isolating(self.some, self.target), reads=False)
                gained = mass(alone, self.target, self.reads) - mass(self.clean, self.target, self.reads)
                self.say(name, row["share"], float(gained.mean() / self.had.mean()))
            elif row["edit"] in sites:
                edits = [self.ablated(sites[row["edit"]], layer) for layer in layers_of(row["layers"])]
                self.say(name, row["share"], self.share_removed(edits))
            elif row["link"] == "variance_neurons":
                names = self.super_neurons()
                changes = [one for each in names for one in self.part(each)]
                self.say(f"{name} ({len(names)})", row["share"], self.share_removed(changes))
            else:
                self.left.append(name)

    def super_neurons(self) -> list[str]:
        """Super neurons, and the neurons among the makers."""
        table = pd.read_parquet(self.folder / "neurons.parquet")
        found = table.loc[table["is_super"] & table["sink_position"].eq(self.sink), ["layer", "neuron"]]
        made = pd.read_parquet(self.folder / "makers.parquet").query("kind == 'neuron' and is_maker")
        pairs = {*map(tuple, found.to_numpy().tolist()), *map(tuple, made[["layer", "unit"]].to_numpy().tolist())}
        return [f"{int(layer)}.{int(neuron)}" for layer, neuron in sorted(pairs)]

    def placement(self) -> None:
        table = pd.read_parquet(self.folder / "placement.parquet")
        bos = self.model.config.bos_token_id
        plain = self.some[:, 1:] if bool((self.some[:, 0] == bos).any()) else self.some
        for row in table.to_dict("records"):
            ids, place, mask = plain.clone(), int(row["position"]), None
            if row["token"] == "bos":
                ids[:, place] = bos
            if row["isolated"]:
                mask = isolating(ids, place)
            again = mass(run(self.model, ids, mask=mask, reads=False), place, self.reads).mean()
            self.say(f"{row['token']} at {place}{', isolated' * row['isolated']}", row["sink_mass"], float(again))

    def worth(self) -> None:
        row, n = self.effects.iloc[0], self.some.shape[1]
        self.say("loss, nats", float(row["baseline_loss_nats"]), loss_of(self.clean, self.some))
        first = max(self.sink + 1, min(FIRST_QUERIES, n // 4))
        mask = isolating(self.some, 0)  # the first position sees only itself in any case
        mask[:, :, first:, self.sink] = torch.finfo(torch.float32).min
        masked = run(self.model, self.some, mask=mask, reads=False)
        self.say("loss without the sink, nats", float(row["masked_loss_nats"]), loss_of(masked, self.some))


def layers_of(text: str) -> list[int]:
    """``1-2,11`` as numbers."""
    ends = [part.split("-") for part in str(text).split(",")]
    return [layer for part in ends for layer in range(int(part[0]), int(part[-1]) + 1)]


def main(folder: str, model: str) -> int:
    """Print every claim and its second number; the number of those that are off."""
    screen = Screen(Path(folder), model)
    for part in (screen.where, screen.makers, screen.links, screen.placement, screen.worth):
        part()
    for one in screen.left:
        sys.stdout.write(f"not recomputed: {one}\n")
    return screen.off


if __name__ == "__main__":
    sys.exit(1 if main(*sys.argv[1:3]) else 0)
