"""How soon a link's codec follows its bandwidth: two hosts reduce over a shaped link that drops to a tenth and recovers, again and again.

Made by `atoll lab` (network namespaces; needs root and Linux): two sites 20 ms apart, hosts with 200 Mbit/s, shaped by token buckets at
both ends of a host's cable. Rounds of 2 million values follow each other; codecs are adapted (`AdaptiveCodecs`: its own measurements,
nothing is told), and of every round's bytes 0.15 s are hidden behind computing. Prints every decision as the Events tell it, and for every
change of the bandwidth the seconds until the first decision that follows it: to a coarser codec after a drop, to a more exact one after a
recovery.

    python benchmarks/fabric_adaptive.py [--changes 4] [--seconds 10] [--slowness 10] [--json]
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec
import torch
from report import print_json, print_table

from atoll.cluster.file import parse_cluster
from atoll.codec import codec_spec
from atoll.events import AnyEvent, CodecChosen, ReductionFinished
from atoll.fabric import Fabric
from atoll.fabric.collective import AdaptiveCodecs, Collective, RoundMember, equal_network, make_plan
from atoll.lab import Lab

ELEMENTS = 2_000_000
HIDDEN_SECONDS = 0.15
HOSTS = ("oslo-0", "rome-0")
CLUSTER = """
[[site]]
name = "oslo"
network = { bandwidth = "200 Mbit/s", latency = "50 us" }
  [[site.host]]
  devices = [{ kind = "T4" }]
[[site]]
name = "rome"
network = { bandwidth = "200 Mbit/s", latency = "50 us" }
  [[site.host]]
  devices = [{ kind = "T4" }]
[[link]]
between = ["oslo", "rome"]
bandwidth = "1 Gbit/s"
latency = "20 ms"
"""


class Chosen(msgspec.Struct, frozen=True):
    """A decision, and when the process of this machine's clock took it."""

    at: float
    host: str
    link: str
    before: str
    codec: str
    reason: str


class Rounds(msgspec.Struct, frozen=True):
    """How long a round took that ended then."""

    at: float
    seconds: float


class Report(msgspec.Struct, frozen=True):
    """What a process saw."""

    chosen: list[Chosen]
    rounds: list[Rounds]


def main() -> None:
    """Measures and prints, or is one of the processes."""
    if sys.argv[1:2] == ["--work"]:
        print(msgspec.json.encode(work(int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])).decode())
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10.0, help="between changes")
    parser.add_argument("--slowness", type=float, default=10.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    changes, reports = measure(arguments.changes, arguments.seconds, arguments.slowness)
    start = changes[0][0]
    decided = sorted((one for report in reports for one in report.chosen), key=lambda one: one.at)
    rows = [reaction(number, changes, decided, reports[0]) for number in range(len(changes))]
    events = [{**msgspec.structs.asdict(one), "at": round(one.at - start, 2)} for one in decided]
    if arguments.json:
        print_json({"changes": rows, "events": events})
        return
    print_table("What the bandwidth did, and the codecs after it", list(rows[0]), [list(row.values()) for row in rows])
    print_table(
        "Decisions", ("at s", "host", "link", "codec", "reason"), [[e["at"], e["host"], e["link"], e["codec"], e["reason"]] for e in events]
    )


def reaction(number: int, changes: Sequence[tuple[float, str]], decided: Sequence[Chosen], report: Report) -> dict[str, object]:
    """A change of the bandwidth, and how soon the first decision followed it the right way."""
    at, what = changes[number]
    until = changes[number + 1][0] if number + 1 < len(changes) else float("inf")
    after = [one for one in decided if at < one.at < until and one.before and _coarser(one) == (what == "drops")]
    seconds = [one.seconds for one in report.rounds if at < one.at < until]
    first = after[0] if after else None
    return {
        "bandwidth": what,
        "reaction s": first.at - at if first else "none",
        "from": first.before if first else "",
        "to": first.codec if first else "",
        "links that followed": len({(one.host, one.link) for one in after}),
        "the last of them after s": max(one.at for one in after) - at if after else "none",
        "median round s": statistics.median(seconds) if seconds else "",
    }


def _coarser(one: Chosen) -> bool:
    return codec_spec(one.codec).relative_error > codec_spec(one.before).relative_error


def measure(changes: int, seconds: float, slowness: float) -> tuple[list[tuple[float, str]], list[Report]]:
    """A process on each host; the bandwidth of one host changes while they work."""
    done: list[tuple[float, str]] = []
    with Lab(parse_cluster(CLUSTER, "benchmark")) as lab:
        addresses = list(map(lab.address, HOSTS))
        length = (changes + 1) * seconds
        command = [sys.executable, os.path.abspath(__file__), "--work"]
        processes = [
            lab.start(host, [*command, str(rank), str(length), *addresses], stdout=subprocess.PIPE) for rank, host in enumerate(HOSTS)
        ]
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()  # it has begun
        time.sleep(seconds)
        for number in range(changes):
            what = "recovers" if number % 2 else "drops"
            if what == "drops":
                lab.slow(HOSTS[1], slowness)
            else:
                lab.restore()
            done.append((time.time(), what))
            time.sleep(seconds)
        outputs = [process.communicate(seconds + 120)[0] for process in processes]
    return done, [msgspec.json.decode(output.splitlines()[-1], type=Report) for output in outputs]


def work(rank: int, seconds: float, addresses: Sequence[str]) -> Report:
    """One process: rounds for so long."""
    torch.set_num_threads(1)
    name, chosen, rounds = HOSTS[rank], [], []

    def observe(event: AnyEvent) -> None:
        if isinstance(event, CodecChosen):
            chosen.append(Chosen(time.time(), name, event.link, event.before, event.codec, event.reason))
        elif isinstance(event, ReductionFinished):
            rounds.append(Rounds(time.time(), event.seconds))

    collective = Collective(name, observer=observe)
    collective.codecs = AdaptiveCodecs(collective.estimate, collective.clock, observe, nbytes=2.0 * ELEMENTS, hidden_seconds=HIDDEN_SECONDS)
    with Fabric(name, services=[collective.service]) as fabric:
        collective.attach(fabric)
        fabric.listen(f"{addresses[rank]}:7000")
        if rank == 0:
            fabric.run(fabric.connect(f"{addresses[1]}:7000").connected(60))
        while len(fabric.peers) < 1:
            time.sleep(0.05)
        print("begun", flush=True)
        buffer, number, end = torch.randn(ELEMENTS), 0, time.time() + seconds
        while True:
            plan = make_plan(f"round {number}", ELEMENTS, [RoundMember(name=host) for host in HOSTS], equal_network(HOSTS, 25e6))
            buffer[0] = 1e6 if time.time() > end else 0.0  # a mark among the values, so that both end with the same round
            result = collective.reduce_soon(plan, buffer).result()
            if not result.complete or float(result.value[0]) > 1e5:
                break
            number += 1
    collective.close()
    return Report(chosen, rounds)


if __name__ == "__main__":
    main()
