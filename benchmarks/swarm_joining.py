"""How soon joiners are of use, and what they cost those who train: 16 join one stage of a simulated swarm at once.

    python benchmarks/swarm_joining.py [--json] [--joiners 16] [--micro-batches 1200]

Two stages of 24 and 8 workers with 1 Gbit/s each, up and down, which state, activations and gradients share; all joiners are placed in the
smaller one. Copying is what the stage's bytes take over a joiner's link or, where that is more, what all joiners' take over the
eight donors' links. A joiner is of use when it has finished a first kernel. `slowed` compares what the eight finish a second, in the
steps from the one the joiners came in to the one in which all were of use, with what they finished before.
"""

import argparse
import sys

from report import print_json, print_table

from atoll.control import Settings
from atoll.control.messages import Ack
from atoll.simulate.peers import PeerModel, PeerSwarm

STAGES = 2
LARGE, SMALL = 24, 8  # workers of the two stages
MODEL = PeerModel(
    forward_seconds=0.06,
    backward_seconds=0.14,
    latency_seconds=0.01,
    activation_bytes=1e6,
    state_bytes=1e9,
    gradient_bytes=1e8,
    bytes_per_s=1.25e8,
    shared_links=True,
)
STEPS_BEFORE = 2
MOST_SLOWED, MOST_COPIES = 0.2, 2.0


def settings(micro_batches: int) -> Settings:
    """Many chunks, so that donors are never busy with one for long."""
    return Settings(
        stages=STAGES,
        micro_batches=micro_batches,
        steps=10**9,
        chunks=64,
        heartbeat_seconds=1.0,
        patience_seconds=30.0,
        in_flight=4096,
        acknowledge_forward=False,
    )


class Finished:
    """Counts the micro-batches finished by some workers."""

    def __init__(self) -> None:
        self.workers: set[str] = set()
        self.count = 0

    def watch(self, source: str, target: str, message: object) -> None:
        """Sees every message."""
        self.count += isinstance(message, Ack) and source in self.workers


def unequal_swarm(micro_batches: int) -> tuple[PeerSwarm, Finished]:
    """Both stages begin equal; then most of one are killed. Runs until steps are regular."""
    swarm = PeerSwarm(settings(micro_batches), MODEL)
    for index in range(2 * LARGE):
        swarm.start(f"peer{index}")
    swarm.loop.run(1e6, lambda: len(swarm.committed) > 0)
    mates = [name for name, worker in swarm.workers.items() if worker.stage == 1]
    for name in mates[SMALL:]:
        swarm.kill(name)
    finished = Finished()
    finished.workers = set(mates[:SMALL])
    swarm.network.watch = finished.watch
    swarm.loop.run(1e6, lambda: len(swarm.committed) > 2)
    return swarm, finished


def simulate(joiners: int, micro_batches: int, after: float) -> dict[str, object]:
    """They come `after` so much of a step has passed."""
    swarm, finished = unequal_swarm(micro_batches)
    first, steps = swarm.loop.now, len(swarm.committed)
    finished.count = 0
    swarm.loop.run(1e6, lambda: len(swarm.committed) == steps + STEPS_BEFORE)
    step = (swarm.loop.now - first) / STEPS_BEFORE
    before = finished.count / (swarm.loop.now - first)
    committed, finished.count = swarm.loop.now, 0
    swarm.loop.run(swarm.loop.now + after * step)
    began = swarm.loop.now
    names = [f"joiner{index}" for index in range(joiners)]
    for name in names:
        swarm.start(name)
    useful: dict[str, float] = {}
    while len(useful) < joiners and swarm.loop.now < began + 600:
        swarm.loop.run(swarm.loop.now + 0.1)
        useful |= {name: swarm.loop.now - began for name in names if name not in useful and swarm.workers[name].kernels.speed > 0}
    steps = len(swarm.committed)
    swarm.loop.run(1e6, lambda: len(swarm.committed) > steps)
    during = finished.count / (swarm.loop.now - committed)
    latest = max(useful.values(), default=float("inf"))
    copying = MODEL.state_bytes / MODEL.bytes_per_s * max(1.0, joiners / SMALL)
    return {
        "joiners": joiners,
        "came_after_share_of_a_step": after,
        "step_s": step,
        "copying_s": copying,
        "of_use": len(useful),
        "of_use_after_s": latest,
        "of_use_in_copies": latest / copying,
        "slowed": 1 - during / before,
    }


def main() -> int:
    """Exit code 1 where they come later or cost more than asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--joiners", type=int, default=16)
    parser.add_argument("--micro-batches", type=int, default=1200, help="of a step")
    options = parser.parse_args()
    rows = []
    for count in (1, options.joiners):
        for after in (0.1, 0.5, 0.9):
            print(f"{count} after {after:.0%} of a step", file=sys.stderr, flush=True)
            rows.append(simulate(count, options.micro_batches, after))
    met = all(float(str(row["slowed"])) <= MOST_SLOWED and float(str(row["of_use_in_copies"])) <= MOST_COPIES for row in rows)
    if options.json:
        print_json({"met": met, "slowed_at_most": MOST_SLOWED, "copies_at_most": MOST_COPIES, "rows": rows})
    else:
        header = list(rows[0])
        print_table("Joining, simulated", header, [[row[name] for name in header] for row in rows])
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
