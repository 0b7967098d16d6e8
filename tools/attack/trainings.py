"""Trainings with a monitor that something happens to: they must end as without it, and keep what was read."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sink_lens.records import read_run
from sink_lens.training import SinkMonitor
from sink_lens.training.monitor_keys import KeySums
from tests.tiny_families import tiny

FAMILIES = ("llama", "gpt2", "gemma2", "gpt_oss", "headnorm_sink", "opt")
STEPS = 6


class OwnError(Exception):
    """What the training itself raises."""


def drawn(rng: random.Random, folder: Path) -> tuple[str, Callable[[], object]]:
    """A training with a monitor, and what happens to it."""
    what = rng.choice(list(_KINDS))
    seed, family = rng.randrange(10**6), rng.choice(FAMILIES)
    return f"{what}, {family}, seed {seed}", lambda: _KINDS[what](random.Random(seed), family)


class Loop:
    """A training whose batches and mishaps are drawn from a seed, so that it can be had with and without a monitor."""

    def __init__(self, rng: random.Random, family: str) -> None:
        self.seed = rng.randrange(10**6)
        self.model = tiny(family).train()
        if rng.random() < 0.3:
            for one in self.model.parameters():
                one.requires_grad_(rng.random() < 0.5)
            next(self.model.parameters()).requires_grad_(True)
        if rng.random() < 0.3:
            layers = next(one for one in self.model.modules() if isinstance(one, torch.nn.ModuleList))
            layers[1] = layers[0]
        self.accumulated, self.nan_at = rng.choice([1, 1, 2, 3]), rng.choice([None, None, None, 2])
        self.bf16 = rng.random() < 0.3
        given = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(given, lr=1e-2)
        self.losses: list[float] = []
        self.readable: list[int] = []
        """Steps whose first batch has a sequence that does not begin with padding."""

    def batch(self, rng: random.Random) -> dict[str, torch.Tensor]:
        """Draw a batch of any length and number, ragged, masked on either side, or nothing but padding."""
        sequences, length = rng.choice([1, 2, 5]), rng.choice([1, 2, 7, 8, 9, 20, 30])
        tokens = torch.randint(3, 300, (sequences, length), generator=torch.Generator().manual_seed(rng.randrange(99)))
        found = {"input_ids": tokens, "labels": tokens}
        how = rng.choice(["none", "none", "right", "left", "ragged"])
        if how != "none":
            mask = torch.ones_like(tokens)
            for row in range(sequences if how == "ragged" else 1):
                cut = rng.randrange(length + 1)
                mask[row, :cut] = 0 if how == "left" else 1
                mask[row, cut:] = 1 if how == "left" else 0
            found["attention_mask"] = mask
        return found

    def run(
        self, monitor: SinkMonitor | None, *, first: int = 0, last: int = STEPS, ends_at: int | None = None
    ) -> None:
        """Some steps of it."""
        for step in range(first, last):
            rng = random.Random(f"{self.seed}/{step}")
            if step == ends_at:
                raise OwnError
            for part in range(self.accumulated):
                batch = self.batch(rng)
                if not part and bool(batch.get("attention_mask", torch.ones(1, 1))[:4, 0].any()):
                    self.readable.append(step)
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.bf16):
                    loss = self.model(**batch, use_cache=False).loss
                loss.backward()
                self.losses.append(float(loss.detach()))
            self.optimizer.step()
            self.optimizer.zero_grad()
            if step == self.nan_at:
                with torch.no_grad():
                    next(self.model.parameters()).fill_(float("nan"))
            if monitor is not None:
                monitor.step()

    def hooks(self) -> int:
        """Return how many hooks stand on the model."""
        return sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in self.model.modules())


def _same(one: list[float], other: list[float]) -> bool:
    return torch.equal(torch.tensor(one).nan_to_num(-1), torch.tensor(other).nan_to_num(-1))


def _like_the_other(rng: random.Random, family: str, *, watch: Callable[[Loop], object]) -> Loop:
    state = rng.getstate()
    plain = Loop(rng, family)
    torch.manual_seed(0)
    plain.run(None)
    rng.setstate(state)
    watched = Loop(rng, family)
    torch.manual_seed(0)
    watch(watched)
    assert _same(plain.losses, watched.losses), "the monitor changed the training"
    pairs = zip(plain.model.parameters(), watched.model.parameters(), strict=True)
    assert all(torch.equal(a.nan_to_num(-1), b.nan_to_num(-1)) for a, b in pairs), "the monitor changed the weights"
    assert not watched.hooks(), "hooks are left on the model"
    return watched


def _any_batch(rng: random.Random, family: str) -> None:
    def watch(loop: Loop) -> None:
        with SinkMonitor(loop.model, every=1, folder="monitor") as monitor:
            loop.run(monitor)
        assert not monitor.stopped, "the monitor stopped"
        found = sorted(set(read_run("monitor").tables["monitor"]["step"]))
        assert loop.nan_at is not None or found == loop.readable, f"readings are missing: {found}"

    _like_the_other(rng, family, watch=watch)


def _error_of_its_own(rng: random.Random, family: str) -> None:
    name, at = (
        rng.choice(["add_state", "add_attention", "sum_values", "compute_reading", "is_complete"]),
        rng.randrange(20),
    )
    kind = rng.choice([ValueError, MemoryError, KeyError, RuntimeError, RecursionError])
    calls, own = [0], getattr(KeySums, name)

    def broken(self: Any, *given: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] > at:
            raise kind("of the monitor")
        return own(self, *given, **named)

    def watch(loop: Loop) -> None:
        setattr(KeySums, name, broken)
        with SinkMonitor(loop.model, every=1, folder="monitor") as monitor:
            loop.run(monitor)

    _like_the_other(rng, family, watch=watch)


def _ended_and_resumed(rng: random.Random, family: str) -> None:
    """The training raises, and goes on in the same process, or from a step before."""
    ends, back = rng.randrange(1, STEPS), rng.choice([0, 0, 1])

    def watch(loop: Loop) -> None:
        closed = rng.random() < 0.5
        monitor = SinkMonitor(loop.model, every=1, folder="monitor")
        monitor.__enter__()
        try:
            loop.run(monitor, ends_at=ends)
        except OwnError as error:
            if closed:
                monitor.__exit__(type(error), error, None)
        found = sorted(set(read_run("monitor").tables["monitor"]["step"]))
        assert loop.nan_at is not None or found == loop.readable, f"readings are missing: {found}"
        if not closed:
            monitor.detach_hooks()
        begin = max(0, ends - back)
        with SinkMonitor(loop.model, every=1, folder="monitor", first_step=begin) as again:
            loop.run(again, first=ends)
        kept = set(read_run("monitor").tables["monitor"]["step"])
        assert kept >= {one for one in found if one < begin}, f"readings are lost: {found}, {kept}"

    _like_the_other(rng, family, watch=watch)


_KINDS: dict[str, Callable[[random.Random, str], None]] = {
    "any batch": _any_batch,
    "an error of the monitor's": _error_of_its_own,
    "ended and resumed": _ended_and_resumed,
}
