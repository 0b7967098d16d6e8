"""What a training step costs: the head norm over our baseline, and our baseline over a plain ``LlamaForCausalLM``.

    python benchmarks/training.py --quick                          # the toy size, under a minute on two cores
    python benchmarks/training.py                                  # toy and small, with and without compile
    python benchmarks/training.py --device cuda --dtype bfloat16   # up to the paper's 152M, on a GPU

A step is what the trainer does: forward and backward of each accumulated part (under autocast in bfloat16), the
gradient clipped, AdamW with the gains kept out of the decay. The three models have the same shapes, the two without a
norm the same weights, and all see the same tokens. They take turns in one process, in changing order, and the median of
the rounds' ratios is printed; a round is one step of each on a CPU, ten on a GPU, after steps to warm up.

Memory is the peak of a step above the loaded model and optimizer: on a CPU from the kernel's high-water mark, on a GPU
as the allocator counts. Tokens per second are of each model; the share of peak counts 6 FLOPs a parameter and token
(embeddings not counted twice) and the causal half of the attention, over what the device's data sheet says, or
``--peak``.

The last line is the worst over the sizes, compiled and not: ``headnorm_step`` (head norm per head over our baseline),
``plain_step`` (our baseline over the plain model) and ``memory`` (the same).
"""

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from measure import peak as resident_peak
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from sink_lens.models.headnorm import undecayed
from sink_lens.training.config import TrainConfig
from sink_lens.training.model import model_of

ROUNDS = 9
"""Fewest rounds; more are made while the seconds given to a case last."""
PEAKS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10": 125e12,
    "L4": 121e12,
}
"""Part of a GPU's name -> dense bfloat16 FLOPs a second, from its data sheet."""
NAMES = ("headnorm_step", "plain_step", "memory")


@dataclass(kw_only=True)
class Arm:
    """One model with its optimizer."""

    name: str
    model: nn.Module
    run: Any
    """The model, or its compiled form."""
    optimizer: torch.optim.Optimizer
    seconds: list[float] = field(default_factory=list)
    """Seconds of a step, round by round."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A size, a device, a type, compiled or not."""

    config: TrainConfig
    device: torch.device
    dtype: torch.dtype
    peak: float
    seconds: float

    @property
    def name(self) -> str:
        """Return what it is called."""
        one = self.config
        shape = f"{one.batch} x {one.length}" + f" in {one.accumulation}" * (one.accumulation > 1)
        return (
            f"{one.size} ({shape}), {str(self.dtype).removeprefix('torch.')}"
            + ", compiled" * one.compile
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the toy size without compile only")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtype", default=None, choices=["float32", "bfloat16"], help="bfloat16 is autocast"
    )
    parser.add_argument(
        "--sizes", nargs="+", default=None, help="of sink-lens train: toy small medium paper"
    )
    parser.add_argument(
        "--batch", type=int, default=None, help="sequences a step; by size if not given"
    )
    parser.add_argument("--compile", choices=["both", "on", "off"], default=None)
    parser.add_argument(
        "--peak", type=float, default=None, help="FLOPs a second of the device, as 989e12"
    )
    options = parser.parse_args()
    device = torch.device("cpu" if options.quick and options.device == "cpu" else options.device)
    print(
        f"{_named(device)}; torch {torch.__version__}, {torch.get_num_threads()} threads",
        flush=True,
    )
    every = cases(options, device)
    # All times first: counting memory makes the allocator slow.
    found = [times(case) for case in every]
    for case, ratios in zip(every, found, strict=True):
        ratios |= memory(case)
        print(
            f"{case.name}: " + " ".join(f"{name}={ratios[name]:.3f}" for name in NAMES), flush=True
        )
    print(" ".join(f"{name}={max(ratios[name] for ratios in found):.3f}" for name in NAMES))


def cases(options: argparse.Namespace, device: torch.device) -> list[Case]:
    """Return what is measured: batches that fit, and steps of at most a second or two on the device."""
    on_gpu = device.type == "cuda"
    sizes = options.sizes or (
        ["toy"] if options.quick else ["small", "medium", "paper"] if on_gpu else ["toy", "small"]
    )
    dtype = getattr(torch, options.dtype or ("bfloat16" if on_gpu else "float32"))
    asked = options.compile or ("off" if options.quick else "both")
    compiled = {"both": [False, True], "on": [True], "off": [False]}[asked]
    batches = (
        {"toy": 64, "small": 64, "medium": 32, "paper": 8}
        if on_gpu
        else {"toy": 8, "small": 4, "medium": 1}
    )
    made = []
    for size in sizes:
        for is_compiled in compiled:
            batch = options.batch or batches.get(size, 1)
            config = TrainConfig(
                size=size, batch=batch, accumulation=1, compile=is_compiled, bos="without"
            )
            peak = options.peak or _peak(device, dtype)
            seconds = 12.0 if options.quick else 60.0
            made.append(Case(config=config, device=device, dtype=dtype, peak=peak, seconds=seconds))
    return made


def times(case: Case) -> dict[str, float]:
    """The ratios of a step's time; tokens per second are printed."""
    batches = _tokens(case)
    plain, base, norm = made = arms(case)
    with torch.no_grad():
        one, other = (
            float(arm.model(input_ids=batches[0], labels=batches[0]).loss) for arm in (plain, base)
        )
    if abs(one - other) > 1e-4 * abs(one) + (1e-2 if case.dtype != torch.float32 else 0):
        raise SystemExit(
            f"the baseline's loss is {other} and the plain model's {one}: they do not do the same"
        )
    each = 10 if case.device.type == "cuda" else 1
    warm_up(made, case, batches, steps=3)
    start, rounds = time.perf_counter(), 0
    while rounds < ROUNDS or time.perf_counter() - start < case.seconds:
        for arm in made if rounds % 2 == 0 else made[::-1]:
            arm.seconds.append(
                _timed(lambda arm=arm: [step(arm, case, batches) for _ in range(each)], case) / each
            )
        rounds += 1
    print(f"{case.name}, {rounds} rounds", flush=True)
    for arm in made:
        seconds = statistics.median(arm.seconds)
        speed = case.config.step_tokens / seconds
        share = speed * flops(arm.model, case.config) / case.peak
        told = f", {share:.1%} of peak" if share == share else ""
        print(
            f"  {arm.name}: {seconds * 1e3:.1f} ms a step, {speed:,.0f} tokens per second{told}",
            flush=True,
        )
    return {"headnorm_step": _ratio(norm, base), "plain_step": _ratio(base, plain)}


def memory(case: Case) -> dict[str, float]:
    """The ratio of a step's peak memory; megabytes are printed."""
    batches = _tokens(case)
    made = arms(case)
    warm_up(made, case, batches, steps=1)
    peaks = {arm.name: peak(arm, case, batches) for arm in made}
    listed = ", ".join(f"{name} {size / 1e6:,.0f}" for name, size in peaks.items())
    print(f"{case.name}, peak above weights and optimizer in MB: {listed}", flush=True)
    return {"memory": peaks["baseline"] / peaks["plain Llama"]}


def warm_up(made: list[Arm], case: Case, batches: list[Tensor], *, steps: int) -> None:
    """Some steps of each: what is compiled is compiled, and the optimizers have their state."""
    for arm in made:
        for _ in range(steps):
            step(arm, case, batches)


def arms(case: Case) -> list[Arm]:
    """The plain model, our baseline with the same weights, and the same with the head norm."""
    own = dict(vars_of(case.config))
    base = model_of(case.config)
    norm = model_of(TrainConfig(**(own | {"value_norm": "per_head"})))
    config = base.config.to_dict()
    known = LlamaConfig().to_dict().keys() - {"model_type", "architectures", "transformers_version"}
    plain = LlamaForCausalLM(
        LlamaConfig(**{name: value for name, value in config.items() if name in known})
    )
    plain.load_state_dict(base.state_dict())
    plain.set_attn_implementation("sdpa")
    return [
        _arm(name, model, case)
        for name, model in (("plain Llama", plain), ("baseline", base), ("head norm", norm))
    ]


def vars_of(config: TrainConfig) -> dict[str, Any]:
    """The fields of a configuration."""
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def _arm(name: str, model: nn.Module, case: Case) -> Arm:
    model = model.to(case.device).train()
    kept = undecayed(model)
    groups = [
        {
            "params": [p for key, p in model.named_parameters() if key not in kept],
            "weight_decay": 0.1,
        },
        {"params": [p for key, p in model.named_parameters() if key in kept], "weight_decay": 0.0},
    ]
    fused = case.device.type == "cuda"
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=fused)
    run = torch.compile(model) if case.config.compile else model
    return Arm(name=name, model=model, run=run, optimizer=optimizer)


def step(arm: Arm, case: Case, batches: list[Tensor]) -> None:
    """One update, as the trainer makes it."""
    for ids in batches:
        with torch.autocast(
            case.device.type, dtype=case.dtype, enabled=case.dtype != torch.float32
        ):
            loss = arm.run(input_ids=ids, labels=ids, use_cache=False).loss / len(batches)
        loss.backward()
    nn.utils.clip_grad_norm_(arm.model.parameters(), 1.0)
    arm.optimizer.step()
    arm.optimizer.zero_grad(set_to_none=True)


def peak(arm: Arm, case: Case, batches: list[Tensor]) -> float:
    """Peak memory of a step in bytes, above what is held between steps; on a CPU the median of two."""
    if case.device.type != "cuda":
        return statistics.median(resident_peak(lambda: step(arm, case, batches)) for _ in range(2))
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(arm, case, batches)
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before)


def flops(model: nn.Module, config: TrainConfig) -> float:
    """FLOPs of a training step for each token: 6 a parameter, and 6 L T d for the causal half of the attention."""
    seen = sum(parameter.numel() for parameter in model.parameters())
    if not config.tied:
        seen -= config.vocab_size * config.d_model  # the embedding is looked up, not multiplied
    return 6.0 * seen + 6.0 * config.n_layers * config.length * config.d_model


def _tokens(case: Case) -> list[Tensor]:
    config = case.config
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (config.batch, config.length), generator=generator).to(
        case.device
    )
    return list(ids.chunk(config.accumulation))


def _timed(run: Callable[[], object], case: Case) -> float:
    if case.device.type == "cuda":
        torch.cuda.synchronize()
    before = time.perf_counter()
    run()
    if case.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - before


def _ratio(arm: Arm, over: Arm) -> float:
    return statistics.median(
        one / other for one, other in zip(arm.seconds, over.seconds, strict=True)
    )


def _peak(device: torch.device, dtype: torch.dtype) -> float:
    if device.type != "cuda" or dtype != torch.bfloat16:
        return float("nan")
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in PEAKS.items() if part in name), float("nan"))


def _named(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


if __name__ == "__main__":
    main()
