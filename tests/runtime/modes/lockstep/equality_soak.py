"""Many plans drawn by seed, on jobs of many kinds, and the cases that the suite leaves out: each must be exact or refused.

python -m tests.runtime.modes.lockstep.equality_soak [PLANS [FIRST SEED]]
"""

import json
import sys
import tempfile
from pathlib import Path

from .equality_cases import MORE_CASES
from .test_equality import is_exact, is_refused, run_tasks

JOBS = ("doubled", "llama", "t5", "mixtral", "deepseek-v3", "transformer", "repeats", "convolutions", "classifier", "padded", "adapted")


def main(plans: int = 200, first: int = 0) -> int:
    """Try so many plans; print each that fails, and how many there were of each kind."""
    tasks = [*MORE_CASES, *((JOBS[seed % len(JOBS)], seed) for seed in range(first, first + plans))]
    with tempfile.TemporaryDirectory() as folder:
        found = run_tasks(Path(folder), list(tasks))
        texts = {}
        for half in Path(folder).iterdir():
            texts.update(json.loads((half / "plans.json").read_text(encoding="utf-8")))
    counts = {"exact": 0, "refused": 0, "wrong": 0}
    for name, seed in tasks:
        task = f"{name} {seed}"
        results = found.get(task, [])
        if is_refused(results):
            counts["refused"] += 1
            print(f"{task}: {next(r['refused'] for r in results if 'refused' in r).splitlines()[0]}")
        elif results and all("steps" in result and is_exact(name, result) for result in results):
            counts["exact"] += 1
        else:
            counts["wrong"] += 1
            print(f"{task} is wrong:\n{texts[task]}{json.dumps(results, indent=1)}")
    print(counts)
    return min(1, counts["wrong"])


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
