"""How fast a large swarm is simulated: 1,000 peers, 4 stages, steps of about 30 virtual seconds, 4 virtual hours, on one core.

    python benchmarks/swarm_scale.py [--json] [--peers 1000] [--hours 4] [--kills-per-hour 60]

Every message, kernel and heart-beat is an event of the protocol's own code; peers are killed at random and others join in their place.
"""

import argparse
import random
import sys
import time

from report import print_json, print_table

from atoll.control import Settings
from atoll.simulate.fuzz import Pulse
from atoll.simulate.peers import PeerModel, PeerSwarm

TARGET_SECONDS = 300.0
STAGES = 4
MODEL = PeerModel(forward_seconds=1.0, backward_seconds=2.5, state_bytes=1e9, bytes_per_s=1.25e8, feeders=4)


def settings(peers: int) -> Settings:
    """Four micro-batches for every worker of a stage in a step."""
    return Settings(
        stages=STAGES,
        micro_batches=peers,
        steps=10**9,
        chunks=2,
        heartbeat_seconds=10.0,
        silent_beats=3,
        gather_seconds=5.0,
        patience_seconds=60.0,
        lost_seconds=120.0,
        hold_seconds=0.0,
        in_flight=4096,
        acknowledge_forward=False,
    )


def simulate(peers: int, hours: float, kills_per_hour: float, seed: int = 0) -> dict[str, object]:
    """One run."""
    draw = random.Random(seed)
    swarm = PeerSwarm(settings(peers), MODEL)
    began = time.process_time()
    alive = [f"peer{index}" for index in range(peers)]
    for name in alive:
        swarm.start(name)
    end, made = hours * 3600.0, peers
    kills = 0
    pulse = Pulse()
    while swarm.loop.now < end:
        pulse(f"{swarm.loop.now / 3600:.2f} of {hours:g} virtual hours, {swarm.loop.events:,} events")
        pause = draw.expovariate(kills_per_hour / 3600.0) if kills_per_hour else end
        swarm.loop.run(min(end, swarm.loop.now + pause))
        if swarm.loop.now < end:
            swarm.kill(alive.pop(draw.randrange(len(alive))))
            alive.append(f"peer{made}")
            swarm.start(alive[-1])
            made, kills = made + 1, kills + 1
    seconds = time.process_time() - began
    steps = sorted(step.seconds for step in swarm.committed)
    return {
        "peers": peers,
        "stages": STAGES,
        "virtual_hours": hours,
        "kills": kills,
        "steps": len(steps),
        "median_step_s": steps[len(steps) // 2] if steps else 0.0,
        "rollbacks": len(swarm.rollbacks),
        "events": swarm.loop.events,
        "cpu_seconds": seconds,
        "events_per_second": swarm.loop.events / max(seconds, 1e-9),
    }


def main() -> int:
    """Exit code 1 where it took longer than the target allows for so many hours."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--peers", type=int, default=1000)
    parser.add_argument("--hours", type=float, default=4.0)
    parser.add_argument("--kills-per-hour", type=float, default=60.0)
    options = parser.parse_args()
    found = simulate(options.peers, options.hours, options.kills_per_hour)
    met = float(str(found["cpu_seconds"])) <= TARGET_SECONDS * options.hours / 4.0
    if options.json:
        print_json({**found, "target_cpu_seconds": TARGET_SECONDS * options.hours / 4.0, "met": met})
    else:
        header = ("peers", "virtual_hours", "kills", "steps", "median_step_s", "events", "cpu_seconds", "events_per_second")
        print_table("A large swarm, simulated", header, [[found[name] for name in header]])
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
