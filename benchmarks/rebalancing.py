"""What rebalancing keeps of the optimum while spot machines come and go: the protocol's own code on a virtual clock.

    python benchmarks/rebalancing.py --trace events.csv [--json] [--every none 300 60] [--peers 32] [--stages 4] [--hours 0] [--seed 0]

A trace is a CSV of `time_s,event,node_id` (add, remove) or of `time_s,alive_count`; at most `--peers` are used, in order of arrival. Every
worker has the same speed; whoever is removed dies without a word; a stage's state is copied over the network by those who join or move.
Settings are the product's defaults, saving too: states travel to the coordinator over its peers' links and are written to its disk, and
where a stage loses all its workers everybody goes back to the last checkpoint and reads it from there.

Two shares are printed, both of what was committed. `share_of_optimum`, which the targets are about as SWARM's figures are: of what this
same swarm commits with the peers alive at each moment, best assigned and undisturbed, as measured by a run for every number of peers a
stage. It loses by stages out of balance, by joining and moving, by work lost and redone. `share_of_ideal`: of the arithmetic alone,
as if pipelines never filled or drained and gradients were summed in no time.
"""

import argparse
import sys
import time
from itertools import pairwise
from pathlib import Path

import msgspec
from report import print_json, print_table

from atoll.control import Settings
from atoll.control.rebalancing import best_throughput
from atoll.errors import AtollError
from atoll.simulate.fuzz import Pulse
from atoll.simulate.peers import PeerModel, PeerSwarm
from atoll.simulate.traces import Change, alive_over_time, read_trace

TARGETS = {"none": 0.827, "300": 0.958, "60": 0.976}
FEW_PEERS, FEW_PEERS_TARGET = 3, 0.9  # with fewer for a stage, stages get lost: rebalanced each minute, this share is to be kept
MODEL = PeerModel(
    forward_seconds=0.06, backward_seconds=0.14, state_bytes=2e9, gradient_bytes=2e8, bytes_per_s=1.25e9, latency_seconds=0.005
)
UNDISTURBED_STEPS = 4


def limited(changes: list[Change], peers: int) -> list[Change]:
    """At most so many peers at once: others who come are not used until one goes."""
    found: list[Change] = []
    inside: list[str] = []
    waiting: list[str] = []
    for change in changes:
        if change.joins:
            if len(inside) < peers:
                inside.append(change.peer)
                found.append(change)
            else:
                waiting.append(change.peer)
        elif change.peer in waiting:
            waiting.remove(change.peer)
        elif change.peer in inside:
            inside.remove(change.peer)
            found.append(change)
            if waiting:
                inside.append(waiting.pop(0))
                found.append(Change(change.at, True, inside[-1]))
    return found


def settings(every: str, options: argparse.Namespace) -> Settings:
    """One of the three ways; all else as a user's run has it."""
    return Settings(
        stages=options.stages,
        micro_batches=options.micro_batches,
        steps=10**9,
        chunks=8,
        rebalance_seconds=0.0 if every == "none" else float(every),
        staleness=options.staleness,
    )


def undisturbed(replicas: int, options: argparse.Namespace) -> float:
    """Micro-batches a second of a swarm with so many workers in every stage to whom nothing happens."""
    if replicas == 0:
        return 0.0
    swarm = PeerSwarm(settings("none", options), MODEL)
    for index in range(replicas * options.stages):
        swarm.start(f"peer{index}")
    swarm.loop.run(1e9, lambda: len(swarm.committed) > UNDISTURBED_STEPS)
    return UNDISTURBED_STEPS * int(options.micro_batches) / (swarm.committed[-1].at_seconds - swarm.committed[0].at_seconds)


def integrated(changes: list[Change], end: float, rates: list[float], stages: int) -> float:
    """Micro-batches done by the end at `rates[n]` while n peers could serve every stage."""
    steps = [*alive_over_time(changes), (end, 0)]
    return sum((min(stop, end) - min(start, end)) * rates[alive // stages] for (start, alive), (stop, _) in pairwise(steps))


def replay(changes: list[Change], end: float, every: str, options: argparse.Namespace, rates: list[float]) -> dict[str, object]:
    """Runs the trace once. `rates`: of the undisturbed swarm by workers a stage."""
    swarm = PeerSwarm(settings(every, options), msgspec.structs.replace(MODEL, seed=options.seed))
    began = time.process_time()
    pulse = Pulse()
    for change in changes:
        swarm.loop.run(min(change.at, end))
        pulse(f"rebalancing {every}: {swarm.loop.now / 3600:.1f} of {end / 3600:.1f} virtual hours")
        if change.at >= end:
            break
        if change.joins:
            swarm.start(change.peer)
        else:
            swarm.kill(change.peer)
    swarm.loop.run(end)
    seconds = time.process_time() - began
    last = swarm.committed[-1].at_seconds if swarm.committed else end
    stages = options.stages
    ideal = [best_throughput([1.0 / MODEL.seconds] * (count * stages), [1.0] * stages) for count in range(len(rates))]
    done = swarm.useful_micro_batches()  # by `last`: the step under way at the end is neither counted nor expected
    steps = [step.seconds for step in swarm.committed]
    return {
        "rebalance_every_s": every,
        "share_of_optimum": done / max(integrated(changes, last, rates, stages), 1e-9),
        "target": target(every, options.peers // stages),
        "share_of_ideal": done / max(integrated(changes, last, ideal, stages), 1e-9),
        "moves": len(swarm.moves),
        "moved_twice_within_300_s": flaps(swarm),
        "steps": len(steps),
        "median_step_s": sorted(steps)[len(steps) // 2] if steps else 0.0,
        "stages_lost": len(swarm.rollbacks),
        "steps_lost": sum(lost.lost for lost in swarm.rollbacks),
        "checkpoints": len(swarm.saves),
        "retries": sum(feeder.retries for feeder in swarm.feeders),
        "virtual_hours": end / 3600,
        "events": swarm.loop.events,
        "cpu_seconds": seconds,
        "events_per_second": swarm.loop.events / max(seconds, 1e-9),
    }


def target(every: str, peers_for_a_stage: int) -> float | None:
    """The share of the optimum to reach: what SWARM published, or, with few peers, our own."""
    if peers_for_a_stage < FEW_PEERS:
        return FEW_PEERS_TARGET if every == "60" else None
    return TARGETS.get(every)


def flaps(swarm: PeerSwarm) -> int:
    """How often a peer was moved again within five minutes."""
    last: dict[str, float] = {}
    count = 0
    for move in swarm.moves:
        count += move.at_seconds - last.get(move.name, -1e9) < 300
        last[move.name] = move.at_seconds
    return count


def parameters(options: argparse.Namespace) -> dict[str, object]:
    """Everything the result depends on."""
    return {
        "stages": options.stages,
        "peers_at_most": options.peers,
        "micro_batches_of_a_step": options.micro_batches,
        "staleness": options.staleness,
        "seed": options.seed,
        **{name: getattr(MODEL, name) for name in MODEL.__struct_fields__ if name != "seed"},
    }


def main() -> int:
    """Exit code 1 where a target is missed, 2 where the trace cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--every", nargs="+", default=["none", "300", "60"], help="seconds between rebalancings, or none")
    parser.add_argument("--peers", type=int, default=32, help="at most so many at once; others who come wait until one goes")
    parser.add_argument("--stages", type=int, default=4, help="of the pipeline")
    parser.add_argument("--hours", type=float, default=0.0, help="of the trace; 0: all")
    parser.add_argument("--micro-batches", type=int, default=1000, help="of a step")
    parser.add_argument("--staleness", type=int, choices=(0, 1), default=0, help="1: a step runs while the one before it is summed")
    parser.add_argument("--seed", type=int, default=0, help="of routing, jitter and the network")
    options = parser.parse_args()
    try:
        trace = read_trace(options.trace)
    except AtollError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    changes, end = limited(trace, options.peers), min(options.hours * 3600 or float("inf"), trace[-1].at)
    print("the same swarm undisturbed, for every number of peers", file=sys.stderr)
    rates = [undisturbed(count, options) for count in range(options.peers // options.stages + 1)]
    rows = [replay(changes, end, every, options, rates) for every in options.every]
    met = all(row["target"] is None or row["share_of_optimum"] >= row["target"] for row in rows)  # type: ignore[operator]
    if options.json:
        print_json({"trace": options.trace.name, "met": met, "parameters": parameters(options), "undisturbed_per_s": rates, "ways": rows})
    else:
        header = (
            "rebalance_every_s",
            "share_of_optimum",
            "target",
            "share_of_ideal",
            "moves",
            "stages_lost",
            "steps_lost",
            "checkpoints",
            "median_step_s",
        )
        print(", ".join(f"{name} {value}" for name, value in parameters(options).items()))
        print_table("Share of the optimum", header, [[row[name] for name in header] for row in rows])
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
