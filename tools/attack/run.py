"""The attack: ``python tools/attack/run.py --seed 1 --minutes 30``, which is ``make attack SEED=1 MINUTES=30``.

Bad command lines, calls, files and folders are drawn from a seed, each tried in a process of its own on a copy of a
small workspace. Whatever was given: the exit code is 0, 2 or that of Ctrl-C, an error is one line, there is no
traceback, no control character reaches the terminal, what a refused command found is still there, nothing is written
over a file that is no result, no code ran, and nothing was reached over a network. A training with a monitor ends as
the one without. Each attempt may take 4 GiB of memory besides what it begins with. Counts are printed by category; the
exit code is 1 if anything failed, and each failure says by which ``--only`` number it is repeated.
"""

import os

os.environ |= {  # read by the libraries when they are first imported
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "MPLBACKEND": "agg",
    "COLUMNS": "200",
    "TQDM_DISABLE": "1",
}

import argparse
import hashlib
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

for _beside in (Path(__file__).parents[2], Path(__file__).parents[2] / "tests" / "checking"):
    sys.path.append(str(_beside))

import attempts
import workspace
from bad_values import copy_of
from child import Outcome, attempt, canary

_BAR_UP = "\x1b[A"
"""Escape sequence with which tqdm moves the cursor up."""
_SAID = ("error:", "warning:", "There is no folder ", "marked as sinks by ")
"""How lines beside a refusal begin: a name is looked for on the hub, or the sink finder says why it marks none."""
_WORDS = {"accepted": "done", "refused": "refused", "stopped": "stopped"}


def main() -> int:
    """Attack for some minutes or attempts, and print the counts by category."""
    asked = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--minutes", type=float, default=60.0)
    asked.add_argument("--first", type=int, default=0, help="begin at this attempt, so that an attack can be split")
    asked.add_argument("--attempts", type=int, default=10**9, help="no more than this many")
    asked.add_argument("--only", type=int, help="repeat one attempt, and show it")
    asked.add_argument("--category", choices=attempts.CATEGORIES, action="append", help="only these")
    asked.add_argument("--short", action="store_true", help="a small workspace, built in seconds")
    asked.add_argument("--workspace", type=Path, help="keep the workspace here, for the next attack")
    options = asked.parse_args()
    with tempfile.TemporaryDirectory(prefix="attack-") as place:
        template = (options.workspace or Path(place) / "template").absolute()
        if not template.exists():
            workspace.build(template, long=not options.short)
        os.chdir(place)
        attempts.warm(template, Path(place) / "warm")
        return _attack(options, template=template, place=Path(place))


def _attack(options: argparse.Namespace, *, template: Path, place: Path) -> int:
    begun, end = time.monotonic(), time.monotonic() + 60 * options.minutes
    counts: dict[str, Counter[str]] = {name: Counter() for name in attempts.CATEGORIES}
    kinds: dict[str, Counter[str]] = {name: Counter() for name in attempts.CATEGORIES}
    failures: list[str] = []
    numbers = [options.only] if options.only is not None else range(options.first, options.first + options.attempts)
    for number in numbers:
        if time.monotonic() > end:
            break
        rng = random.Random(f"{options.seed}/{number}")
        category = attempts.category_of(rng, only=options.category)
        found, label, kind = _one(
            rng, category, template=template, folder=place / f"{number}", shown=options.only is not None
        )
        counts[category][found if found in _WORDS else "failed"] += 1
        if kind:
            kinds[category][kind] += 1
        if found not in _WORDS:
            failures.append(f"{category}, --seed {options.seed} --only {number}: {label}\n    {found}")
            print(f"FAILED {failures[-1]}", flush=True)
    width = max(map(len, counts))
    print(f"\nseed {options.seed}, {time.monotonic() - begun:,.0f} s")
    for category, found in counts.items():
        told = ", ".join(f"{found[name]:,} {word}" for name, word in _WORDS.items() if found[name])
        of = ", ".join(f"{number:,} {kind}" for kind, number in sorted(kinds[category].items()))
        print(
            f"{category:{width}}  {sum(found.values()):6,} attempts: {told or 'none'}, {found['failed']} failed"
            + (f" ({of})" if of else "")
        )
    total = sum(sum(found.values()) for found in counts.values())
    print(f"{'together':{width}}  {total:6,} attempts: {len(failures)} failed")
    return 1 if failures else 0


def _one(rng: random.Random, category: str, *, template: Path, folder: Path, shown: bool) -> tuple[str, str, str]:
    """Try something; "accepted", "refused" or "stopped", or what is wrong; what was tried, and of which kind it is."""
    copy_of(template, folder)
    try:
        plan = attempts.CATEGORIES[category](rng, folder)
        before = contents(folder)
        outcome = (
            plan.run(folder)
            if plan.run is not None
            else attempt(plan.action, folder, encoding=plan.encoding, patience=plan.patience)
        )
        if shown:
            print(f"{plan.label}\n--- stdout\n{outcome.out}\n--- stderr\n{outcome.err}\n--- trace\n{outcome.trace}")
            print(f"exit code {outcome.code}, {outcome.seconds:.1f} s")
        return judge(outcome, plan, before=before, folder=folder), plan.label, plan.kind
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def contents(folder: Path) -> dict[str, str]:
    """Every file that a refused command must leave as it is: path -> hash."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and path.relative_to(folder).parts[0] != "cache"
    }


def judge(outcome: Outcome, plan: "attempts.Attempt", *, before: dict[str, str], folder: Path) -> str:
    """Return how an attempt ended, in a word; or what is wrong with how it ended."""
    lines = [line.rpartition("\r")[2] for line in outcome.err.split("\n")]  # a bar is written over
    lines = [line for line in lines if line.strip()]
    errors = [line for line in lines if line.startswith(("error:", "interrupted:", "stopped;"))]
    usage = any(line.lstrip().startswith("Usage:") for line in lines)
    if canary(folder):
        return "CODE RAN"
    if outcome.reached:
        return f"reached {outcome.reached[:3]}"
    if outcome.stopped and "Exception ignored in" in outcome.err:  # Ctrl-C in the clean-up of Python itself: it is lost
        return "stopped"
    if plan.call and outcome.stopped and "KeyboardInterrupt" in outcome.trace:
        return "stopped"
    if "Traceback" in outcome.err or (outcome.trace and not outcome.ours):
        stack = outcome.trace or outcome.err
        return stack[-1800:]
    if plan.call:
        if outcome.code and (not outcome.ours or "\n" in outcome.trace.strip()):
            return f"no error of one line: {outcome.trace[:500]}"
        return "refused" if outcome.code else "accepted"
    if outcome.stopped and outcome.code == 130 and len(errors) == 1:
        return "stopped"
    if outcome.code not in (0, 2) and not (outcome.code == 1 and plan.may_fail):
        return f"exit code {outcome.code}: {outcome.err[-800:]}"
    if outcome.code == 2 and not usage and len(errors) != 1:
        return f"{len(errors)} lines of errors: {outcome.err[-800:]}"
    if outcome.code == 2 and not usage and [line for line in lines if not line.startswith(_SAID)]:
        return f"more than one line: {outcome.err[-800:]}"
    if wild := {hex(ord(one)) for one in outcome.out + outcome.err.replace(_BAR_UP, "") if _wild(one)}:
        return f"control characters in the terminal: {wild}: {(outcome.err + outcome.out)[-500:]!r}"
    if outcome.code == 2 or plan.keeps:
        after = contents(folder)
        lost = [name for name, digest in before.items() if after.get(name) != digest and not _own(name, plan.out)]
        if plan.keeps and outcome.code == 0 and plan.out is not None:
            lost = [name for name in lost if not Path(name).is_relative_to(plan.out)]
        if lost:
            word = "a refused" if outcome.code == 2 else "an accepted"
            return f"{word} command changed {', '.join(lost[:8])}: {outcome.err[-500:]}"
    return "refused" if outcome.code == 2 else "accepted"


def _own(name: str, out: str | None) -> bool:
    """Return whether a file is one that the run itself writes again and again."""
    return Path(name).name in (".lock", "report.html") or (out is not None and Path(name) == Path(out) / "run.json")


def _wild(character: str) -> bool:
    code = ord(character)
    bidi = 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069
    return (code < 32 and character not in "\n\t\r") or 127 <= code < 160 or bidi


if __name__ == "__main__":
    sys.exit(main())
