"""What rebalancing keeps of the optimum while spot machines come and go: the protocol's own code on a virtual clock.

    python benchmarks/rebalancing.py --trace events.csv [--json] [--every none 300 60] [--peers 32] [--hours 0]

A trace is a CSV of `time_s,event,node_id` (add, remove) or of `time_s,alive_count`; at most `--peers` are used, in order of arrival. Every
worker has the same speed; a stage's state is copied over the network by those who join or move. The optimum at each moment is that of
the best assignment of the peers then alive to the stages, without any cost of moving, sealing, reducing or redoing; the share is what was
committed.
"""

import argparse
import sys
import time
from itertools import pairwise
from pathlib import Path

from report import print_json, print_table

from atoll.control import Settings
from atoll.control.rebalancing import best_throughput
from atoll.errors import AtollError
from atoll.simulate.peers import PeerModel, PeerSwarm
from atoll.simulate.traces import Change, alive_over_time, read_trace

TARGETS = {"none": 0.827, "300": 0.958, "60": 0.976}
STAGES = 4
MODEL = PeerModel(
    forward_seconds=0.06, backward_seconds=0.14, state_bytes=2e9, gradient_bytes=2e8, bytes_per_s=1.25e9, latency_seconds=0.005
)


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


def settings(every: str, micro_batches: int) -> Settings:
    """One of the three ways."""
    return Settings(
        stages=STAGES,
        micro_batches=micro_batches,
        steps=10**9,
        chunks=8,
        heartbeat_seconds=2.0,
        silent_beats=3,
        gather_seconds=2.0,
        patience_seconds=20.0,
        hold_seconds=4.0,
        hold_limit_seconds=20.0,
        lost_seconds=60.0,
        in_flight=1024,
        rebalance_seconds=0.0 if every == "none" else float(every),
        migration_seconds=10.0,
        acknowledge_forward=False,
    )


def optimum(changes: list[Change], end: float) -> float:
    """Micro-batches the best assignment would have done by the end."""
    steps = [*alive_over_time(changes), (end, 0)]
    total = 0.0
    for (start, alive), (stop, _) in pairwise(steps):
        total += (min(stop, end) - min(start, end)) * best_throughput([1.0 / MODEL.seconds] * alive, [1.0] * STAGES)
    return total


def replay(changes: list[Change], end: float, every: str, micro_batches: int) -> dict[str, object]:
    """Runs the trace once."""
    swarm = PeerSwarm(settings(every, micro_batches), MODEL)
    began = time.process_time()
    for change in changes:
        swarm.loop.run(min(change.at, end))
        if change.at >= end:
            break
        if change.joins:
            swarm.start(change.peer)
        else:
            swarm.kill(change.peer)
    swarm.loop.run(end)
    seconds = time.process_time() - began
    last = swarm.committed[-1][0] if swarm.committed else end
    best = optimum(changes, last)  # the step under way at the end is neither counted nor expected
    steps = [step.seconds for _, step in swarm.committed]
    return {
        "rebalance_every_s": every,
        "share_of_optimum": swarm.useful_micro_batches() / best if best else 0.0,
        "target": TARGETS.get(every),
        "moves": len(swarm.moves),
        "moved_twice_within_300_s": flaps(swarm),
        "steps": len(steps),
        "median_step_s": sorted(steps)[len(steps) // 2] if steps else 0.0,
        "rollbacks": swarm.rollbacks,
        "retries": sum(feeder.retries for feeder in swarm.feeders),
        "virtual_hours": end / 3600,
        "events": swarm.loop.events,
        "cpu_seconds": seconds,
        "events_per_second": swarm.loop.events / max(seconds, 1e-9),
    }


def flaps(swarm: PeerSwarm) -> int:
    """How often a peer was moved again within five minutes."""
    last: dict[str, float] = {}
    count = 0
    for at, move in swarm.moves:
        count += at - last.get(move.worker, -1e9) < 300
        last[move.worker] = at
    return count


def main() -> int:
    """Exit code 1 where a target is missed, 2 where the trace cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--every", nargs="+", default=["none", "300", "60"], help="seconds between rebalancings, or none")
    parser.add_argument("--peers", type=int, default=32, help="at most so many at once")
    parser.add_argument("--hours", type=float, default=0.0, help="of the trace; 0: all")
    parser.add_argument("--micro-batches", type=int, default=1600, help="of a step")
    options = parser.parse_args()
    try:
        changes = limited(read_trace(options.trace), options.peers)
    except AtollError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    end = min(options.hours * 3600 or float("inf"), changes[-1].at)
    rows = [replay(changes, end, every, options.micro_batches) for every in options.every]
    met = all(row["target"] is None or row["share_of_optimum"] >= row["target"] for row in rows)  # type: ignore[operator]
    if options.json:
        print_json({"trace": options.trace.name, "stages": STAGES, "peers": options.peers, "met": met, "ways": rows})
    else:
        header = ("rebalance_every_s", "share_of_optimum", "target", "moves", "moved_twice_within_300_s", "steps", "events_per_second")
        print_table("Share of the optimum", header, [[row[name] for name in header] for row in rows])
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
