"""Does anything stay behind? Thousands of connections that come and go, an hour's worth of faults, a tensor larger than 2 GB.

    python -m tests.fabric.soak [--cycles 10000] [--fault-seconds 3600] [--speed 20] [--gigabytes 2.2] [--json]

Everything runs over TCP with mutual TLS, among members of a run. Connections come and go properly and rudely (nonsense, half a hand-shake,
half a frame). Faults come as often as they would in so many seconds, one every four, but `--speed` times as fast: connections are reset,
held, refused and spoiled, peers leave and come back, while calls, streams, cancellations and reductions go on.
After each part everything that is counted must be where it was before it: files, threads, tasks, streams; memory may not grow by more than
a kilobyte a connection. Millions of malformed inputs: `python -m tests.fabric.frame_fuzz`.
"""

import argparse
import ctypes
import gc
import json
import os
import random
import socket
import ssl
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from atoll.errors import FabricError
from atoll.fabric import Fabric
from atoll.fabric.address import split_address
from atoll.fabric.frame import Hello, Kind, encode_frame
from atoll.fabric.security import Authority, Credentials, RunMember, enrol, serve
from tests.fabric.security.test_refusals import Board
from tests.fabric.services import Named, Store
from tests.fabric.soak_faults import FaultyParty

_WARM_UP = 300
_ALLOWED_BYTES = 1024  # of growth for each connection or fault: what the allocator leaves unused between objects, not what is kept
_ALLOWED_IN_ALL = 16 << 20  # threads come and go, and each may leave the allocator another arena
_SETTLE_SECONDS = 60.0


class Counts(msgspec.Struct, frozen=True):
    """What a process holds."""

    files: int
    threads: int
    tasks: int
    links: int
    objects: int
    memory_bytes: int


def counts(*fabrics: Fabric) -> Counts:
    """Of this process and of some of its fabrics."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Counts(
        files=len(os.listdir("/proc/self/fd")),
        threads=threading.active_count(),
        tasks=sum(len(fabric._tasks) for fabric in fabrics),
        links=sum(len(fabric._links) for fabric in fabrics),
        objects=len(gc.get_objects()),
        memory_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
    )


def settled(before: Counts, look: Callable[[], Counts]) -> Counts:
    """What there is once nothing more goes away."""
    end = time.monotonic() + _SETTLE_SECONDS
    while True:
        now = look()
        held = now.files <= before.files and now.threads <= before.threads and now.tasks <= before.tasks and now.links <= before.links
        if held or time.monotonic() > end:
            return now
        time.sleep(0.2)


def verdict(name: str, times: int, before: Counts, after: Counts, seconds: float) -> dict[str, object]:
    """A row of the table; `leaks` names what grew."""
    allowed = {"objects": max(1000, times // 10), "memory_bytes": max(_ALLOWED_IN_ALL, times * _ALLOWED_BYTES)}
    old, new = msgspec.structs.asdict(before), msgspec.structs.asdict(after)
    leaks = [field for field in old if new[field] > old[field] + allowed.get(field, 0)]
    row: dict[str, object] = {"part": name, "times": times, "seconds": round(seconds, 1)}
    for field in ("files", "threads", "tasks", "links", "objects"):
        row[field] = f"{old[field]} → {new[field]}"
    grown = after.memory_bytes - before.memory_bytes
    return row | {"memory MB": f"{before.memory_bytes / 1e6:.1f} {grown / 1e6:+.1f}", "leaks": ", ".join(leaks) or "none"}


# ---- connections that come and go


def come_and_go(directory: Path, times: int) -> dict[str, object]:
    """Members that join, call and leave; strangers and members that behave badly."""
    authority = Authority.create(directory)
    coordinator, address = serve(authority, "127.0.0.1:0", services=[Board()])
    with coordinator:
        rome = enrol(address, authority.issue_token(uses=3), "rome")
        oslo = enrol(address, authority.issue_token(uses=3), "oslo")
        cycle(address, rome, oslo, _WARM_UP)
        nothing = Counts(10**9, 10**9, 0, 0, 10**9, 0)
        look: Callable[[], Counts] = lambda: counts(coordinator.fabric)  # noqa: E731
        settled(msgspec.structs.replace(nothing, tasks=10**9), look)
        time.sleep(1.0)
        before, start = look(), time.monotonic()
        cycle(address, rome, oslo, times)
        return verdict("connections", times, before, settled(before, look), time.monotonic() - start)


def cycle(address: str, rome: Credentials, oslo: Credentials, times: int) -> None:
    """Half of them are whole members, half are rude in one of six ways."""
    for number in range(times):
        if number % 2:
            rude(address, oslo, number // 2 % 6)
        else:
            with RunMember(rome) as member:
                remote = member.join(address)
                assert remote.call_sync(Board.post, Named("x")).name.endswith("x")
        if number % 1000 == 999:
            print(f"{number + 1} connections, {counts().memory_bytes / 1e6:.1f} MB", file=sys.stderr, flush=True)


def rude(address: str, credentials: Credentials, how: int) -> None:
    """One connection that ends badly."""
    hello = encode_frame(Kind.HELLO, 0, Hello("oslo", "worker", 1 << 20, 1 << 20, 1 << 20, 1 << 20, 1.0))
    with socket.create_connection(split_address(address), timeout=60) as sock:
        if how == 0:
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            return
        if how == 1:
            return  # not a byte
        try:
            with credentials.client_context.wrap_socket(sock) as secured:
                secured.sendall(hello if how > 2 else b"")
                if how > 3:
                    secured.recv(20)
                    secured.sendall(encode_frame(Kind.GOODBYE, 0) if how == 4 else hello[: len(hello) // 2])
        except (ssl.SSLError, ConnectionError):
            pass  # it is refused, which is right


# ---- an hour of faults


def faults(directory: Path, fault_seconds: float, speed: float, seed: int) -> tuple[dict[str, object], Counter[str]]:
    """Four peers with traffic between all of them, and faults on every way."""
    with FaultyParty(directory, random.Random(seed)) as party:
        look: Callable[[], Counts] = lambda: counts(*party.fabrics())  # noqa: E731
        party.play(fault_seconds / 3, speed)  # what is made once is made, and the allocator has what it needs
        before = party.quiet(look)
        start = time.monotonic()
        party.happened.clear()
        party.play(fault_seconds, speed)
        after = settled(before, lambda: party.quiet(look))
        done = party.happened.copy()
        number = sum(count for what, count in done.items() if what in party.FAULTS)
        return verdict("faults", number, before, after, time.monotonic() - start), done


# ---- large tensors


def send_large(gigabytes: float) -> None:
    """A tensor that no 32-bit length holds."""
    with Fabric("rome", services=[Store()]) as rome, Fabric("oslo") as oslo:
        tensor = torch.arange(int(gigabytes * 1e9) // 8)
        try:
            reply = oslo.connect(rome.listen()).call_sync(Store.echo, Named("large", [tensor]))
        except FabricError as error:
            raise SystemExit(f"a tensor of {gigabytes} GB failed: {error}") from None
        assert torch.equal(reply.tensors[0], tensor)
        print(f"a tensor of {tensor.nbytes} bytes went there and back", file=sys.stderr)


def main() -> int:
    """The command; 1 if anything stayed behind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=10_000)
    parser.add_argument("--fault-seconds", type=float, default=3600.0)
    parser.add_argument("--speed", type=float, default=20.0)
    parser.add_argument("--gigabytes", type=float, default=2.2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    happened: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as directory:
        if arguments.gigabytes:
            send_large(arguments.gigabytes)
        if arguments.cycles:
            rows.append(come_and_go(Path(directory) / "cycles", arguments.cycles))
        if arguments.fault_seconds:
            row, happened = faults(Path(directory) / "faults", arguments.fault_seconds, arguments.speed, arguments.seed)
            rows.append(row)
    if arguments.json:
        print(json.dumps({"parts": rows, "happened": happened}, indent=1))
    else:
        for row in rows:
            print("  ".join(f"{key}: {value}" for key, value in row.items()))
        print("  ".join(f"{what}: {count}" for what, count in sorted(happened.items())))
    return 0 if all(row["leaks"] == "none" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
