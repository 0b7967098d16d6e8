"""A long run of changes of models with a lens on them: none may be silently wrong.

    python tools/changed_models.py --out changed.jsonl                 # 10,000 steps over ten families
    python tools/changed_models.py --out changed.jsonl --steps 500 --seed 3

Each step does to a tiny model what a user may do (the rules are in ``tests/checking/changed_models.py``), then compares
what each door gives with a fresh wrap of a deep copy. A line of JSON a step is added to the file; the same call goes on
after the last whole episode, and one on a file that is done prints its counts: of each rule how often it was done, how
often the model was refused, and failures. Rules with fewer than 100 steps do not count. The exit code is 1 if a door
was silently wrong, refused what reaches it, or answered what it must refuse.
"""

import argparse
import collections
import json
import os
import sys
import traceback
from pathlib import Path
from random import Random
from typing import Any

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
}
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "checking")]

EPISODE = 25
"""Steps on one model; a run that was stopped goes on with the next."""
ENOUGH = 100


def done(file: Path, *, seed: int) -> list[dict[str, Any]]:
    """The steps of whole episodes in the file."""
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    steps = []
    for line in lines:
        try:
            steps.append(json.loads(line))
        except ValueError:  # the last one of a process that was killed
            continue
    steps = [one for one in steps if one["seed"] == seed]
    whole = collections.Counter(one["episode"] for one in steps)
    return [one for one in steps if whole[one["episode"]] == EPISODE]


def episode(number: int, *, seed: int) -> list[dict[str, Any]]:
    """The steps of one episode: a family, a model and changes drawn from the seed."""
    import changed_models as changed

    family = changed.FAMILIES[number % len(changed.FAMILIES)]
    draw, found = Random(seed * 1_000_003 + number), []  # nothing is secret
    world = changed.World(family, seed=draw.randrange(10**6))
    for at in range(EPISODE):
        rule, said = draw.choice(list(changed.RULES)), ""
        try:
            outcome = world.step(rule)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is a finding
            outcome = type(error).__name__
            said = "".join(traceback.format_exception(error, limit=-3))[-1500:]
            world.begin()
        step = {
            "seed": seed,
            "episode": number,
            "step": at,
            "family": family,
            "rule": rule,
            "outcome": outcome,
        }
        found.append(step | ({"said": said} if said else {}))
    return found


def table(steps: list[dict[str, Any]]) -> tuple[list[str], bool]:
    """Counts by rule, and whether a step failed."""
    by_rule: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for one in steps:
        by_rule[one["rule"]][one["outcome"]] += 1
    lines = [f"{'rule':24} {'done':>5} {'same':>5} {'refused':>7} {'failed':>6}"]
    failed = 0
    for rule, counts in sorted(by_rule.items()):
        wrong = sum(n for name, n in counts.items() if name not in ("same", "refused", "left out"))
        failed += wrong
        n = sum(counts.values()) - counts["left out"]
        few = f"  (fewer than {ENOUGH}: does not count)" if n < ENOUGH else ""
        lines.append(f"{rule:24} {n:5} {counts['same']:5} {counts['refused']:7} {wrong:6}{few}")
    silent = sum(one["outcome"] == "SilentlyWrongError" for one in steps)
    lines.append(f"{len(steps)} steps, {silent} silently wrong, {failed - silent} other failures")
    return lines, failed > 0


def main() -> None:
    """Run what is missing, and print the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    print(f"seed {asked.seed}", flush=True)
    steps = done(asked.out, seed=asked.seed)
    known = {one["episode"] for one in steps}
    for number in range(-(-asked.steps // EPISODE)):
        if number in known:
            continue
        found = episode(number, seed=asked.seed)
        with asked.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(one) + "\n" for one in found)
        steps += found
        failures = [one for one in found if "said" in one]
        for one in failures:
            print(json.dumps(one), flush=True)
        if number % 20 == 19:
            print(f"{len(steps)} steps", flush=True)
    lines, failed = table(steps)
    print("\n".join(lines))
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
