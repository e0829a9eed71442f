"""What latency costs a swarm and a GPipe pipeline over the same links, for transformer layers of three sizes, simulated.

    python benchmarks/latency_hiding.py [--json] [--megabits 500] [--micro-batches 128]

One layer a device, four stages of four devices. The swarm is the protocol's own code on a virtual clock; GPipe is four pipelines side by
side, each micro-batch forward through all stages, then backward, a flush at the end of the step, with sends that overlap compute (which
favours it). Both send uncompressed half-precision activations over uplinks of the same bandwidth and latency. Utilisation is the
share of time devices compute; `kept` is the rate as a share of the same way's rate without latency. Latencies are round trips.
"""

import argparse
import sys

import msgspec
from report import print_json, print_table

from atoll.control import Settings
from atoll.simulate.peers import PeerModel, PeerSwarm

STAGES = 4
REPLICAS = 4
TOKENS = 2048  # of a micro-batch
FLOPS = 20e12  # a device sustains
BACKWARD = 2.5  # forwards
ROUND_TRIPS = (0.0, 0.010, 0.050, 0.100, 0.200)
GPIPE_MICRO_BATCHES = 8
STEPS = 2
PUBLISHED = {  # utilisation at 500 Mbit/s: SWARM (ICML 2023, arXiv 2301.11913), one layer a device, round trips of 0 and 200 ms
    ("base", 0.0): 0.18,
    ("base", 0.200): 0.015,
    ("GPT-3", 0.0): 0.82,
    ("GPT-3", 0.200): 0.48,
}


class Layer(msgspec.Struct, frozen=True):
    """A transformer layer: width and length of what it attends to."""

    name: str
    width: int
    sequence: int

    @property
    def forward_seconds(self) -> float:
        """Of a micro-batch: matrix products of attention and the feed-forward part, and attention itself."""
        return TOKENS * (24.0 * self.width**2 + 4.0 * self.sequence * self.width) / FLOPS

    @property
    def activation_bytes(self) -> float:
        """Of a micro-batch in half precision."""
        return 2.0 * TOKENS * self.width


LAYERS = (Layer("base", 768, 512), Layer("xxlarge", 1536, 512), Layer("GPT-3", 12288, 2048))


def swarm_rate(layer: Layer, round_trip: float, bytes_per_s: float, micro_batches: int) -> float:
    """Micro-batches a second of the swarm, from commit to commit. `micro_batches`: of a step, for each device."""
    seconds = layer.forward_seconds
    model = PeerModel(
        forward_seconds=seconds,
        backward_seconds=BACKWARD * seconds,
        latency_seconds=round_trip / 2,
        activation_bytes=layer.activation_bytes,
        bytes_per_s=bytes_per_s,
    )
    settings = Settings(
        stages=STAGES, micro_batches=micro_batches * REPLICAS, steps=10**9, patience_seconds=60.0, in_flight=4096, acknowledge_forward=False
    )
    swarm = PeerSwarm(settings, model)
    for index in range(STAGES * REPLICAS):
        swarm.start(f"peer{index}")
    swarm.loop.run(1e9, lambda: len(swarm.committed) > STEPS)
    return STEPS * settings.micro_batches / (swarm.committed[-1].at_seconds - swarm.committed[0].at_seconds)


def gpipe_seconds(layer: Layer, round_trip: float, bytes_per_s: float, micro_batches: int) -> float:
    """A step of one pipeline: when its last backward ends."""
    wire, latency = layer.activation_bytes / bytes_per_s, round_trip / 2
    ready = [0.0] * micro_batches
    for direction in (1.0, BACKWARD):
        for stage in range(STAGES):
            free = link = 0.0
            arrived = []
            for at in ready:
                free = max(free, at) + direction * layer.forward_seconds
                link = max(link, free) + (wire if stage < STAGES - 1 else 0.0)
                arrived.append(link + (latency if stage < STAGES - 1 else 0.0))
            ready = arrived
        if direction == 1.0:
            ready = [ready[-1]] * micro_batches  # all forwards first
    return ready[-1]


def gpipe_rate(layer: Layer, round_trip: float, bytes_per_s: float, micro_batches: int) -> float:
    """Micro-batches a second of all pipelines."""
    return REPLICAS * micro_batches / gpipe_seconds(layer, round_trip, bytes_per_s, micro_batches)


def simulated(bytes_per_s: float, micro_batches: int) -> list[dict[str, object]]:
    """A row for every layer and latency."""
    rows: list[dict[str, object]] = []
    for layer in LAYERS:
        best = REPLICAS / ((1 + BACKWARD) * layer.forward_seconds)
        still: dict[str, float] = {}
        for round_trip in ROUND_TRIPS:
            print(f"{layer.name}, {1000 * round_trip:g} ms", file=sys.stderr, flush=True)
            rates = {
                "swarm": swarm_rate(layer, round_trip, bytes_per_s, micro_batches),
                "gpipe": gpipe_rate(layer, round_trip, bytes_per_s, GPIPE_MICRO_BATCHES),
                "gpipe_whole_batch": gpipe_rate(layer, round_trip, bytes_per_s, micro_batches),
            }
            still = still or rates
            row: dict[str, object] = {"layer": layer.name, "round_trip_ms": 1000 * round_trip}
            row |= {f"{name}_utilisation": rate / best for name, rate in rates.items()}
            row |= {f"{name}_kept": rate / still[name] for name, rate in rates.items()}
            rows.append(row | {"published_utilisation": PUBLISHED.get((layer.name, round_trip), "")})
    return rows


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--megabits", type=float, default=500.0, help="a second, of every uplink")
    parser.add_argument("--micro-batches", type=int, default=128, help="of a step, for each device")
    options = parser.parse_args()
    rows = simulated(options.megabits * 1e6 / 8, options.micro_batches)
    parameters = {
        "stages": STAGES,
        "devices_a_stage": REPLICAS,
        "tokens_of_a_micro_batch": TOKENS,
        "device_flops": FLOPS,
        "backward_in_forwards": BACKWARD,
        "uplink_megabits_per_s": options.megabits,
        "micro_batches_a_device": options.micro_batches,
        "gpipe_micro_batches": GPIPE_MICRO_BATCHES,
    }
    if options.json:
        print_json({"parameters": parameters, "simulated": rows})
    else:
        print(", ".join(f"{name} {value:g}" for name, value in parameters.items()))
        header = list(rows[0])
        print_table("Latency hiding, simulated", header, [[row[name] for name in header] for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
