"""The verdicts on a model of the zoo and on functionally equal rewrites of it.

    python -m benchmarks.rewrites --models 30   # goes on where it stopped; rewrites.md, from the rows of rewrites.csv

A link about function keeps its verdict. One about a basis keeps it too, or is *not in this basis* where the stream was
rotated, if it held (in part) before.

- ``gains``: the gains of the norms are folded into the weights that read them.
- ``rotation``: the stream in a random orthonormal basis, after ``gains`` (SliceGPT, arXiv 2401.15024).
- ``smooth``: what a norm gives is divided by a factor a dimension, and the weights that read it are multiplied by it
  (SmoothQuant, arXiv 2211.10438).
- ``permuted neurons``: the neurons of each MLP in another order.
- ``doubled neurons``: each neuron twice, with half of its output weights.
- ``split heads``: each query head twice, with half of its output weights.
"""

import argparse
import copy
import csv
import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from sink_lens import TokenBatch, TraceConfig, trace, wrap
from sink_lens.models.tiny import tiny_tokenizer
from sink_lens.schema import NOT_IN_BASIS
from tests.zoo import LINKS, ZOO, ZooModel, build

ROWS, TABLE = (Path(__file__).with_name(f"rewrites.{ending}") for ending in ("csv", "md"))
COLUMNS = ("model", "family", "seed", "rewrite", *LINKS)
FAMILIES = ("llama", "qwen2", "qwen3")
"""Every norm of the stream in them is an RMSNorm before a sublayer, with a gain that weights can take."""
OF_BASIS = ("neurons_dimension", "dimension_key")
SEQUENCES, LENGTH = 32, 48
Draw = torch.Generator


def _norms(model: Any) -> list[tuple[Any, list[nn.Linear]]]:
    """Each norm of the stream, and the linear maps that read it."""
    found = []
    for block in model.model.layers:
        attention, mlp = block.self_attn, block.mlp
        found.append(
            (block.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj])
        )
        found.append((block.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj]))
    return [*found, (model.model.norm, [model.lm_head])]


def _untied(model: Any) -> None:
    """Give the unembedding weights of its own."""
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def gains(model: Any, _: Draw) -> Any:
    """Fold every gain into the weights that read it."""
    _untied(model)
    for norm, readers in _norms(model):
        for linear in readers:
            linear.weight.mul_(norm.weight)
        norm.weight.fill_(1.0)
    return model


def rotation(model: Any, draw: Draw) -> Any:
    """Rotate the stream."""
    gains(model, draw)
    width = model.config.hidden_size
    basis = torch.linalg.qr(torch.randn(width, width, generator=draw, dtype=torch.float64))[0]

    def turned(weight: Tensor, by: Tensor) -> Tensor:
        return (weight.double() @ by).to(weight.dtype)

    for _, readers in _norms(model):
        for linear in readers:
            linear.weight.copy_(turned(linear.weight, basis))
    model.model.embed_tokens.weight.copy_(turned(model.model.embed_tokens.weight, basis))
    for block in model.model.layers:
        for linear in (block.self_attn.o_proj, block.mlp.down_proj):
            linear.weight.copy_(turned(linear.weight.T, basis).T)
            if linear.bias is not None:
                linear.bias.copy_(turned(linear.bias, basis))
    return model


def smooth(model: Any, draw: Draw) -> Any:
    """Divide what each norm gives by a factor of 1/8 to 8 a dimension."""
    _untied(model)
    for norm, readers in _norms(model):
        by = 2 ** (6 * torch.rand(norm.weight.shape, generator=draw) - 3)
        norm.weight.div_(by)
        for linear in readers:
            linear.weight.mul_(by)
    return model


def _of_neurons(model: Any, index: Callable[[int], Tensor], *, times: float = 1.0) -> Any:
    """Take these neurons of each MLP, with the output weights multiplied."""
    for block in model.model.layers:
        mlp, chosen = block.mlp, index(block.mlp.down_proj.in_features)
        for linear in (mlp.gate_proj, mlp.up_proj):
            linear.weight, linear.out_features = nn.Parameter(linear.weight[chosen]), len(chosen)
        mlp.down_proj.weight = nn.Parameter(mlp.down_proj.weight[:, chosen] * times)
        mlp.down_proj.in_features = mlp.intermediate_size = model.config.intermediate_size = len(
            chosen
        )
    return model


def permuted_neurons(model: Any, draw: Draw) -> Any:
    """Take the neurons in another order."""
    return _of_neurons(model, lambda n: torch.randperm(n, generator=draw))


def doubled_neurons(model: Any, _: Draw) -> Any:
    """Take each neuron twice."""
    return _of_neurons(model, lambda n: torch.arange(n).repeat_interleave(2), times=0.5)


def split_heads(model: Any, _: Draw) -> Any:
    """Take each query head twice."""
    config = model.config
    heads, width = config.num_attention_heads, model.model.layers[0].self_attn.head_dim
    chosen = torch.arange(heads * width).view(heads, width).repeat_interleave(2, 0).flatten()
    config.num_attention_heads, config.head_dim = 2 * heads, width
    for block in model.model.layers:
        attention = block.self_attn
        q, o = attention.q_proj, attention.o_proj
        q.weight, q.out_features = nn.Parameter(q.weight[chosen]), len(chosen)
        if q.bias is not None:
            q.bias = nn.Parameter(q.bias[chosen])
        o.weight, o.in_features = nn.Parameter(o.weight[:, chosen] / 2), len(chosen)
        attention.num_key_value_groups *= 2
    return model


REWRITES: dict[str, Callable[[Any, Draw], Any]] = {
    "rotation": rotation,
    "gains": gains,
    "smooth": smooth,
    "permuted neurons": permuted_neurons,
    "doubled neurons": doubled_neurons,
    "split heads": split_heads,
}


def rewritten(zoo: ZooModel, name: str) -> Any:
    """A rewrite of the model, which gives the same logits.

    Raises:
        AssertionError: it does not.
    """
    model = copy.deepcopy(zoo.model)
    tokens = zoo.draw(4, length=16, generator=Draw().manual_seed(0))
    with torch.no_grad():
        model = REWRITES[name](model, Draw().manual_seed(zoo.seed))
        torch.testing.assert_close(
            model(tokens).logits, zoo.model(tokens).logits, atol=2e-3, rtol=2e-3
        )
    return model


def verdicts(zoo: ZooModel, model: Any) -> dict[str, str]:
    """The verdict on each link."""
    tokens = zoo.draw(SEQUENCES, length=LENGTH, generator=Draw().manual_seed(zoo.seed))
    lens = replace(wrap(model, tokenizer=tiny_tokenizer()), name=zoo.name)
    config = TraceConfig(model=zoo.name, random_init=False, seed=zoo.seed)
    links = trace(lens, config=config, tokens=TokenBatch.from_tensor(tokens), progress=False).links
    return links.drop_duplicates("link").set_index("link")["verdict"].to_dict()


def models_to_rewrite(models: int, seed: int) -> list[tuple[str, str, int]]:
    """The first models of the zoo, each in the families in turn."""
    pairs = [
        (at, name, family)
        for name, kind in ZOO.items()
        for at, family in enumerate(FAMILIES)
        if family in kind.families
    ]
    return [(name, family, seed) for _, name, family in sorted(pairs, key=lambda one: one[0])][
        :models
    ]


def go_on(models: int, *, names: list[str], seed: int) -> None:
    """Make the rows that are not in the file."""
    done = (
        set()
        if not ROWS.exists()
        else set(pd.read_csv(ROWS)[list(COLUMNS[:4])].itertuples(index=False, name=None))
    )
    logging.disable(logging.WARNING)
    for name, family, of in models_to_rewrite(models, seed):
        zoo = build(name, seed=of, family=family)
        for rewrite in ("none", *names):
            if (name, family, of, rewrite) in done:
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = verdicts(zoo, zoo.model if rewrite == "none" else rewritten(zoo, rewrite))
            new = not ROWS.exists()
            with ROWS.open("a", newline="", encoding="utf-8") as file:
                row = (name, family, of, rewrite, *(found[link] for link in LINKS))
                csv.writer(file, lineterminator="\n").writerows([COLUMNS, row] if new else [row])


def same(link: str, *, rewrite: str, before: str, after: str) -> bool:
    """Check that a verdict after a rewrite is the one before it, or may be *not in this basis*."""
    if after == NOT_IN_BASIS and before != after:
        return rewrite == "rotation" and link in OF_BASIS and before in ("holds", "in part")
    return before == after


def table() -> str:
    """Count the verdicts that a rewrite keeps, by rewrite and link, and list the others."""
    frame = pd.read_csv(ROWS).set_index(list(COLUMNS[:4]))
    plain = frame.xs("none", level="rewrite")
    lines = [f"| rewrite | models | {' | '.join(LINKS)} |", f"|{' --- |' * (2 + len(LINKS))}"]
    other = ["", "Other verdicts:", ""]
    for rewrite in REWRITES:
        if rewrite not in frame.index.get_level_values("rewrite"):
            continue
        rows, cells = frame.xs(rewrite, level="rewrite"), []
        for link in LINKS:
            pairs = [(at, plain.loc[at, link], said) for at, said in rows[link].items()]
            right = [
                same(link, rewrite=rewrite, before=before, after=after)
                for _, before, after in pairs
            ]
            cells.append(f"{sum(right)} of {len(right)}")
            for (at, before, after), one in zip(pairs, right, strict=True):
                if not one:
                    other.append(f"- {rewrite}, `{at[0]}` in {at[1]}: {link} {before} -> {after}")
        lines.append(f"| {rewrite} | {len(rows)} | {' | '.join(cells)} |")
    return "\n".join([*lines, *(other if len(other) > 3 else [])]) + "\n"


def main() -> None:
    """Go on with the rows, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, default=0)
    parser.add_argument("--rewrite", choices=list(REWRITES), nargs="+", default=list(REWRITES))
    parser.add_argument("--seed", type=int, default=44_003)
    given = parser.parse_args()
    torch.set_num_threads(1)
    go_on(given.models, names=given.rewrite, seed=given.seed)
    TABLE.write_text(table(), encoding="utf-8")
    print(table())


if __name__ == "__main__":
    main()
