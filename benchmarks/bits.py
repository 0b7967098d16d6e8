"""Print which ways to compute one number are equal to the last bit on this machine: family by way, in a minute.

Each way is compared with one whole forward of the bridge per edit, on a tiny random model of every family: logits (the
same pass again; the plain module with its fused kernel; a pass from a later layer; one sequence outside of its batch),
and the loss of edited runs (cells that begin at a late position; cells that share a forward; forwards side by side).
``bits`` is equal to the last bit; else the largest difference as a share of a row's norm, or of the loss. Nothing is
promised but 1e-5, and ``bits`` for the same pass again.
"""

import platform
from collections.abc import Iterator

import torch
from torch import Tensor

from sink_lens.data.tokens import from_tensor
from sink_lens.edits.constructors import Edit, edit, zero
from sink_lens.edits.metrics import loss
from sink_lens.engine.cells import cell_of_edits
from sink_lens.engine.engine import Engine
from sink_lens.engine.forward import run_with
from sink_lens.engine.plan import Plan
from sink_lens.models.delegation import start_passes_at
from sink_lens.models.lens import LensModel
from sink_lens.models.load import wrap
from sink_lens.models.running import prepare_pass
from sink_lens.models.tiny import VOCAB_SIZE
from tests.tiny_families import MORE_FAMILIES, TINY_FAMILIES, tiny

TOKENS = torch.randint(3, VOCAB_SIZE, (3, 14), generator=torch.Generator().manual_seed(1))
PLANS = {"late": {"pack": 1}, "shared": {"pack": 4}, "side by side": {"pack": 2, "lanes": 2}}
WAYS = ("again", "plain", "later layer", "batch", *PLANS)


def turned(x: Tensor, at: object) -> Tensor:
    """Another direction and size, so that no norm behind the site undoes the edit."""
    return x.flip(-1) + 0.5 * x


def edits_of() -> list[Edit]:
    """Edits of all layers, of late positions and of all."""
    late = [
        edit("z", turned, layers=[layer], positions=[place])
        for layer in range(3)
        for place in (5, 9, 13)
    ]
    return [*late, zero("z", layers=[1], heads=[0]), zero("z", layers=[1], heads=[1])]


def gap(found: Tensor, expected: Tensor) -> float:
    """The largest difference of a row, as a share of its norm."""
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def gaps(lens: LensModel) -> Iterator[tuple[str, float]]:
    """Each way, and how far it is from the bridge's."""
    whole = run_with(lens, TOKENS, sites=("resid_pre",), logits=True)
    assert whole.logits is not None
    again = run_with(lens, TOKENS, sites=("resid_pre",), logits=True).logits
    yield "again", gap(again, whole.logits)
    with torch.no_grad():
        yield "plain", gap(lens.plain(TOKENS, use_cache=False).logits, whole.logits)
    if not lens.family.adds_inside:  # the blocks of BLOOM cannot be skipped
        with (
            torch.no_grad(),
            prepare_pass(lens),
            start_passes_at(lens, 2, whole.tensors["resid_pre", 2]),
        ):
            later = lens.bridge(TOKENS, use_cache=False)
        yield "later layer", gap(later, whole.logits)
    yield "batch", gap(run_with(lens, TOKENS[:1], logits=True).logits, whole.logits[:1])
    tokens, edits = from_tensor(TOKENS), edits_of()
    alone = [run_with(lens, tokens, one).loss for one in edits]
    for name, options in PLANS.items():
        plan = Plan(path="blocks", prompts=3, **options)
        engine = Engine(lens, tokens, [cell_of_edits(one) for one in edits], [loss()], plan=plan)
        frames = [engine.run(block) for block in engine.blocks]
        found = {
            cell: rows["value"].to_numpy()
            for frame in frames
            for cell, rows in frame.groupby("cell")
        }
        yield (
            name,
            max(
                gap(torch.tensor(found[n])[:, None], one.double()[:, None])
                for n, one in enumerate(alone)
            ),
        )


def main() -> None:
    """Print the machine and the table."""
    machine = (
        f"{platform.processor() or platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    )
    print(f"{machine}, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print(f"{'family':18}" + "".join(f"{way:>13}" for way in WAYS))
    for family in (*TINY_FAMILIES, *MORE_FAMILIES):
        found = dict(gaps(wrap(tiny(family))))
        shown = [
            f"{found[way]:.0e}" if found.get(way) else ("bits" if way in found else "")
            for way in WAYS
        ]
        print(f"{family:18}" + "".join(f"{one:>13}" for one in shown))


if __name__ == "__main__":
    main()
