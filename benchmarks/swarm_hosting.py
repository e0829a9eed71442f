"""What machines gain by hosting several stages each: the same machines and slow links, one, two or all four stages a machine, simulated.

    python benchmarks/swarm_hosting.py [--json] [--machines 8] [--micro-batches 1000]

Four stages, equal machines with 200 Mbit/s each, up and down, which activations and gradients share. The ideal is what the machines
compute, whoever has which stage. Hosting keeps activations in memory and costs more gradients to be summed over the links (every stage has
more replicas) and the memory of more stages.
"""

import argparse
import sys

from report import print_json, print_table

from atoll.control import Settings
from atoll.control.messages import Backward, Forward
from atoll.simulate.peers import PeerModel, PeerSwarm

STAGES = 4
STEPS_BEFORE, STEPS = 2, 3
MODEL = PeerModel(
    forward_seconds=0.06,
    backward_seconds=0.14,
    latency_seconds=0.01,
    activation_bytes=4e6,
    state_bytes=4e8,
    gradient_bytes=5e7,
    bytes_per_s=2.5e7,
    shared_links=True,
)


def simulate(machines: int, hosted: int, micro_batches: int) -> dict[str, object]:
    """Machines that host so many stages each, once steps are regular."""
    settings = Settings(
        stages=STAGES,
        micro_batches=micro_batches,
        steps=10**9,
        chunks=16,
        heartbeat_seconds=1.0,
        patience_seconds=30.0,
        in_flight=4096,
        rebalance_seconds=60.0,
        acknowledge_forward=False,
    )
    swarm = PeerSwarm(settings, MODEL)
    for index in range(machines):
        swarm.start(f"m{index}", stages=hosted)
    crossed = 0

    def watch(source: str, target: str, message: object) -> None:
        nonlocal crossed
        crossed += isinstance(message, Forward | Backward) and not source.startswith("feeder")

    swarm.loop.run(1e6, lambda: len(swarm.committed) == STEPS_BEFORE)
    swarm.network.watch = watch
    began = swarm.loop.now
    swarm.loop.run(1e6, lambda: len(swarm.committed) == STEPS_BEFORE + STEPS)
    done = STEPS * micro_batches
    rate = done / (swarm.loop.now - began)
    return {
        "machines": machines,
        "stages_each": hosted,
        "micro_batches_per_s": rate,
        "of_ideal": rate * STAGES * MODEL.seconds / machines,
        "activations_over_links_per_micro_batch": crossed / done,
        "moves": len(swarm.moves),
    }


def main() -> int:
    """Prints a row for every way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--machines", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=1000, help="of a step")
    options = parser.parse_args()
    rows = []
    for hosted in (1, 2, 4):
        print(f"{hosted} stages a machine", file=sys.stderr, flush=True)
        rows.append(simulate(options.machines, hosted, options.micro_batches))
    if options.json:
        print_json({"rows": rows})
    else:
        print_table("Hosting, simulated", [name.replace("_", " ") for name in rows[0]], [list(row.values()) for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
