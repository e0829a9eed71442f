"""What `make demo` predicts of a step against what it takes, several times.

    python benchmarks/demo.py [--json] [--rounds 5] [--load 0 1] [--steps 240]

Each round is what the demo does: this machine is probed as two devices (`atoll probe --quick --processes 2`), then the language model is
planned and trained on them; the report says which step was predicted and which measured (the median). `--load` has so many busy processes
beside all of it, for each number given. Limit: within 20% in every round.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from report import print_json, print_table

ROOT = Path(__file__).parents[1]
LIMIT = 0.20
_ATOLL = "import sys; from atoll.cli.main import main; sys.exit(main())"
_JOB = """import dataclasses, sys
sys.path.insert(0, {examples!r})
from language_model import job as whole
job = dataclasses.replace(whole, steps={steps})
del whole
"""


def atoll(*arguments: str) -> str:
    """What a command prints."""
    done = subprocess.run([sys.executable, "-c", _ATOLL, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    if done.returncode:
        raise SystemExit(f"atoll {' '.join(arguments)}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout


@contextmanager
def load(processes: int) -> Iterator[None]:
    """So many processes that do nothing but keep a core busy."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: sum(range(10**6))"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def one_round(folder: Path, steps: int, beside: int) -> dict[str, Any]:
    """Probe, plan, train, report."""
    folder.mkdir()
    (folder / "train.py").write_text(_JOB.format(examples=str(ROOT / "examples"), steps=steps))
    with load(beside):
        atoll("probe", "--quick", "--processes", "2", "-o", str(folder / "here.toml"))
        atoll("run", str(folder / "train.py"), "--cluster", str(folder / "here.toml"), "--out", str(folder / "run"))
    seconds = json.loads(atoll("report", str(folder / "run"), "--json"))["step_seconds"]
    error = seconds["predicted"] / seconds["median"] - 1
    return {"load": beside, "predicted_seconds": seconds["predicted"], "measured_seconds": seconds["median"], "error": error}


def run(rounds: int, loads: Sequence[int], steps: int) -> list[dict[str, Any]]:
    """Loads take turns."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for beside in loads:
                rows.append({"round": number + 1, **one_round(Path(folder) / f"{number}-{beside}", steps, beside)})
                print(f"round {number + 1}, load {beside}: {rows[-1]['error']:+.1%}", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """Print the table or JSON; exit with 1 when the limit is not met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=240, help="of the training; the demo makes 240")
    options = parser.parse_args()
    rows = run(options.rounds, options.load, options.steps)
    ok = all(abs(row["error"]) <= LIMIT for row in rows)
    if options.json:
        print_json({"rows": rows, "limit": LIMIT, "ok": ok})
    else:
        header = ("round", "load", "predicted ms", "measured ms", "error %")
        cells = [
            (row["round"], row["load"], 1e3 * row["predicted_seconds"], 1e3 * row["measured_seconds"], round(100 * row["error"], 1))
            for row in rows
        ]
        print_table("step of the demo, predicted and measured", header, cells)
        print(f"\nwithin {LIMIT:.0%} in every round: {'ok' if ok else 'NOT MET'}")
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
