"""Recompute what the first screen of a trace says, with transformers and torch alone.

    python tests/checking/first_screen.py RUN MODEL

RUN is the folder of a trace of MODEL, a folder of save_pretrained (Llama, Mistral, Qwen2, Qwen3). From the run come the
sequences and what is claimed; attention, norms, ablations and placements are computed here again, from the definitions
in docs/chain.md and docs/evidence.md. It prints a line a claim, and ends with 1 if one is off by more than 0.005 (a
share, a mass) or one in a hundred (a norm, a rank). What is not recomputed is named at the end.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

FIRST_QUERIES = 8


def show(line: str) -> None:
    sys.stdout.write(f"{line}\n")


class Raw:
    """The model, and where its parts are."""

    def __init__(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        self.layers, self.embed = self.model.model.layers, self.model.model.embed_tokens
        config = self.model.config
        self.d_head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def neurons(self, layer: int):
        """What the MLP's output matrix reads."""
        return self.layers[layer].mlp.down_proj

    def heads(self, layer: int):
        """What the attention's output matrix reads."""
        return self.layers[layer].self_attn.o_proj


@torch.no_grad()
def run(raw: Raw, tokens: Tensor, changes=(), mask: Tensor | None = None):
    """Attention (layer, batch, head, query, key), states (before layer 0, then after each) and the loss, under changes.

    A change is (module, "in" or "out", function of the tensor).
    """
    states: list[Tensor] = []
    handles = [raw.layers[0].register_forward_pre_hook(lambda _, args: states.append(args[0].clone()))]
    handles += [
        one.register_forward_hook(lambda _, a, out: states.append((out[0] if isinstance(out, tuple) else out).clone()))
        for one in raw.layers
    ]
    for module, side, change in changes:
        if side == "in":
            handles.append(module.register_forward_pre_hook(lambda _, args, f=change: (f(args[0].clone()), *args[1:])))
        else:
            handles.append(module.register_forward_hook(lambda _, a, out, f=change: f(out.clone())))
    try:
        options = {} if mask is None else {"attention_mask": mask}
        found = raw.model(tokens, output_attentions=True, use_cache=False, **options)
    finally:
        for handle in handles:
            handle.remove()
    log = found.logits[:, :-1].float().log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    return torch.stack(found.attentions).float(), torch.stack(states).float(), float(-log.mean())


def record(raw: Raw, tokens: Tensor, module, side: str) -> Tensor:
    """What a module takes or gives in the clean run."""
    found: list[Tensor] = []
    run(raw, tokens, [(module, side, lambda x: found.append(x.clone()) or x)])
    return found[0]


def mass(attention: Tensor, position: int, layers: list[int]) -> Tensor:
    """Mean attention of later queries to a position, over heads and layers, by sequence."""
    return attention[layers][..., position + 1 :, position].mean((0, 2, 3))


def at(position: int, value: Tensor, part=slice(None)) -> Callable[[Tensor], Tensor]:
    """Set a part of a tensor at a position."""

    def change(x: Tensor) -> Tensor:
        x[:, position, part] = value
        return x

    return change


def causal(n: int, batch: int) -> Tensor:
    """The mask that transformers adds to the scores: 0 where a query may look."""
    return torch.full((n, n), torch.finfo(torch.float32).min).triu(1).expand(batch, 1, n, n).clone()


class Screen:
    """The claims of a run, and each again."""

    def __init__(self, folder: Path, raw: Raw) -> None:
        self.raw, self.folder, self.off, self.left = raw, folder, 0, []
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
        self.ordinary = torch.ones_like(self.some, dtype=torch.bool)
        self.ordinary[:, self.sink] = False
        if int(first["sinks_left_out"]) != len(self.some):
            self.left.append("means, since other sinks than those at the studied position are left out of them")
        self.clean, _, self.loss = run(raw, self.some)
        self.had = mass(self.clean, self.sink, self.reads)

    def say(self, claim: str, said: float, again: float, *, relative: bool = False) -> None:
        wrong = abs(said - again) > (0.01 * abs(said) + 1e-6 if relative else 0.005)
        self.off += wrong
        show(f"{'OFF ' if wrong else 'ok  '} {claim}: {said:.4f}, again {again:.4f}")

    def mean(self, tensor: Tensor) -> Tensor:
        return tensor[self.ordinary].double().mean(0).float()

    def share_removed(self, changes, mask: Tensor | None = None) -> float:
        attention, _, _ = run(self.raw, self.some, changes, mask)
        return float((self.had - mass(attention, self.sink, self.reads)).mean() / self.had.mean())

    def where(self) -> None:
        attention, states, _ = run(self.raw, self.tokens)
        score = attention[..., self.sink :, :].mean(-2)[..., self.sink]
        rate = (score > self.config["threshold"]).float().mean()
        self.say(f"sink rate at position {self.sink}", float(self.values["sink_rate"]), float(rate))
        norms = states.norm(dim=-1)
        rest = [p for p in range(8, norms.shape[-1]) if p != self.sink]
        ratio = (norms[..., self.sink] / norms[..., rest].median(-1).values).mean(-1)
        table = pd.read_parquet(self.folder / "layers.parquet")
        if "norm_ratio" in table:
            for layer, value in zip(table["layer"], table["norm_ratio"], strict=True):
                self.say(f"norm ratio after layer {layer}", float(value), float(ratio[int(layer) + 1]), relative=True)
        middle = len(self.raw.layers) // 2
        for name, drop in (("effective_rank", False), ("effective_rank_without", True)):
            x = states[middle + 1]
            if drop:
                x = torch.cat([x[:, : self.sink], x[:, self.sink + 1 :]], 1)
            p = torch.linalg.svdvals(x.double())
            p = p / p.sum(-1, keepdim=True)
            again = torch.exp(-(p * p.clamp(min=1e-300).log()).sum(-1)).mean()
            self.say(name.replace("_", " "), float(self.values[name]), float(again), relative=True)

    def part(self, name: str) -> list:
        """The changes that ablate a part of a set of makers."""
        raw, n = self.raw, self.sink
        if found := re.fullmatch(r"(\d+)\.(\d+)", name):
            layer, unit = map(int, found.groups())
            module = raw.neurons(layer)
            return [(module, "in", at(n, self.mean(record(raw, self.some, module, "in"))[unit], unit))]
        if found := re.fullmatch(r"head (\d+)\.(\d+)", name):
            layer, head = map(int, found.groups())
            part, module = slice(head * raw.d_head, (head + 1) * raw.d_head), raw.heads(layer)
            return [(module, "in", at(n, self.mean(record(raw, self.some, module, "in"))[part], part))]
        if name.startswith("position"):
            return []
        written = record(raw, self.some, raw.embed, "out")
        over = written[:, n] - self.mean(written)

        def change(x: Tensor) -> Tensor:
            x[:, n] -= over
            return x

        return [(raw.layers[0], "in", change)]

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
        raw, n = self.raw, self.some.shape[1]
        for row in self.effects.loc[self.effects["is_primary"]].to_dict("records"):
            layers = layers_of(row["layers"])
            name = f"{row['link']}: {row['edit']}"
            if row["edit"] == "isolation":
                mask = causal(n, len(self.some))
                mask[:, :, self.target, : self.target] = torch.finfo(torch.float32).min
                attention, _, _ = run(raw, self.some, mask=mask)
                gained = mass(attention, self.target, self.reads) - mass(self.clean, self.target, self.reads)
                self.say(name, row["share"], float(gained.mean() / self.had.mean()))
            elif row["edit"] in ("mean ablation of attn_out", "mean ablation of the key"):
                attentions = [raw.layers[layer].self_attn for layer in layers]
                modules = [one.k_proj if row["edit"].endswith("key") else one.o_proj for one in attentions]
                means = [self.mean(record(raw, self.some, one, "out")) for one in modules]
                changes = [(one, "out", at(self.sink, mean)) for one, mean in zip(modules, means, strict=True)]
                self.say(name, row["share"], self.share_removed(changes))
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
        bos = self.raw.model.config.bos_token_id
        plain = self.some[:, 1:] if bool((self.some[:, 0] == bos).any()) else self.some
        for row in table.to_dict("records"):
            ids, place, mask = plain.clone(), int(row["position"]), None
            if row["token"] == "bos":
                ids[:, place] = bos
            if row["isolated"]:
                mask = causal(ids.shape[1], len(ids))
                mask[:, :, place, :place] = torch.finfo(torch.float32).min
            attention, _, _ = run(self.raw, ids, mask=mask)
            again = mass(attention, place, self.reads).mean()
            self.say(f"{row['token']} at {place}{', isolated' * row['isolated']}", row["sink_mass"], float(again))

    def worth(self) -> None:
        row, n = self.effects.iloc[0], self.some.shape[1]
        self.say("loss, nats", float(row["baseline_loss_nats"]), self.loss)
        first = max(self.sink + 1, min(FIRST_QUERIES, n // 4))
        mask = causal(n, len(self.some))
        mask[:, :, first:, self.sink] = torch.finfo(torch.float32).min
        self.say("loss without the sink, nats", float(row["masked_loss_nats"]), run(self.raw, self.some, mask=mask)[2])


def layers_of(text: str) -> list[int]:
    """``1-2,11`` as numbers."""
    ends = [part.split("-") for part in str(text).split(",")]
    return [layer for part in ends for layer in range(int(part[0]), int(part[-1]) + 1)]


def main(folder: str, model: str) -> int:
    """Print every claim and its second number; the number of those that are off."""
    screen = Screen(Path(folder), Raw(model))
    for part in (screen.where, screen.makers, screen.links, screen.placement, screen.worth):
        part()
    for one in screen.left:
        show(f"not recomputed: {one}")
    return screen.off


if __name__ == "__main__":
    sys.exit(1 if main(*sys.argv[1:3]) else 0)
