"""Whether a lab keeps what its cluster file promises: bandwidth and round trip asked and measured, what the forwarder between sites costs;
and what the fabric gets with TLS through such a link, against iperf3.

Two sites of two hosts, 200 Mbit/s between sites, one-way latency 20 and 50 ms. TCP carries 1448 bytes in packets of 1500, so 193 Mbit/s are
possible. Needs root (or user namespaces); iperf3 from the distribution's packages, else a plain socket stands in, and the result says so.

    python benchmarks/lab.py [--seconds 8] [--rounds 3] [--json]
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from report import print_json, print_table

from atoll.cluster import Cluster, parse_cluster
from atoll.errors import LabError
from atoll.lab import Lab

CLUSTER = """
name = "benchmark"
[[site]]
name = "oslo"
network = {{ bandwidth = "1 Gbit/s", latency = "50 us" }}
  [[site.host]]
  count = 2
  devices = [{{ kind = "laptop" }}]
[[site]]
name = "rome"
network = {{ bandwidth = "1 Gbit/s", latency = "50 us" }}
  [[site.host]]
  count = 2
  devices = [{{ kind = "laptop" }}]
[[link]]
between = ["oslo", "rome"]
bandwidth = "200 Mbit/s"
latency = "{latency}"
[[device_kind]]
name = "laptop"
memory = "4 GB"
memory_bandwidth = "10 GB/s"
flops = {{ fp32 = "50 GFLOPS" }}
"""
LATENCIES = (0.020, 0.050)
LINK_BYTES_PER_S = 25e6
PAYLOAD_SHARE = 1448 / 1500
SITES_APART, NEIGHBOURS = ("oslo-0", "rome-0"), ("oslo-0", "oslo-1")
PORT = 7001
ROUND_TRIPS = 50
CHUNK_BYTES = 1 << 20
TENSOR_BYTES = 16_000_000


def main() -> None:
    """Measures and prints; or plays a part on one of the lab's hosts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        PARTS[arguments.part[0]](*arguments.part[1:])
        return
    links, fabric = [], []
    for latency in LATENCIES:
        with Lab(cluster(latency), namespaces=True) as lab:
            links += measure_links(lab, latency, arguments.seconds)
            fabric.append(measure_fabric(lab, latency, arguments.seconds, arguments.rounds))
    if arguments.json:
        print_json({"links": links, "fabric": fabric, "load": os.getloadavg()[0]})
    else:
        print_table("asked of the lab, and measured in it", list(links[0]), [list(row.values()) for row in links])
        print_table("TLS 1.3 through 200 Mbit/s", list(fabric[0]), [list(row.values()) for row in fabric])


def cluster(latency_s: float) -> Cluster:
    """Two sites of two hosts."""
    return parse_cluster(CLUSTER.format(latency=f"{latency_s * 1000:g} ms"))


def part(*words: object) -> list[str]:
    """This script as one of its parts."""
    return [sys.executable, str(Path(__file__).resolve()), "--part", *map(str, words)]


# ---- links


def measure_links(lab: Lab, latency_s: float, seconds: float) -> list[dict[str, object]]:
    """Between sites and inside one."""
    rows = []
    for (a, b), bytes_per_s, asked_s in ((SITES_APART, LINK_BYTES_PER_S, latency_s), (NEIGHBOURS, 125e6, 5e-5)):
        round_trip = ask(lab, a, b, part("answer"), part("round_trips", lab.address(b)))
        for flows in (1, 4):
            before, began = processor_seconds(lab), time.monotonic()
            megabits = blast(lab, a, b, seconds, flows)
            rows.append(
                {
                    "way": f"{a} → {b}",
                    "round trip ms, asked": 2000 * asked_s,
                    "round trip ms": 1000 * float(round_trip),
                    "flows": flows,
                    "Mbit/s, asked": bytes_per_s * 8e-6,
                    "Mbit/s, possible": bytes_per_s * 8e-6 * PAYLOAD_SHARE,
                    "Mbit/s": megabits,
                    "forwarder, share of a core": (processor_seconds(lab) - before) / (time.monotonic() - began),
                    "measured by": "iperf3" if has_iperf() else "plain sockets",
                }
            )
    return rows


def has_iperf() -> bool:
    """Whether the peer is there."""
    return shutil.which("iperf3") is not None


def blast(lab: Lab, source: str, target: str, seconds: float, flows: int, warm_up: int = 2) -> float:
    """What TCP gets, in Mbit/s, after a warm-up."""
    if not has_iperf():
        received = ask(lab, source, target, part("sink", flows), part("blast", lab.address(target), seconds, flows))
        return 8e-6 * float(received)
    client = ["iperf3", "-c", lab.address(target), "-t", f"{seconds:g}", "-O", str(warm_up), "-P", str(flows), "-J"]
    said = json.loads(ask(lab, source, target, ["iperf3", "-s", "-1", "--forceflush"], client))
    return float(said["end"]["sum_received"]["bits_per_second"]) / 1e6


def ask(lab: Lab, source: str, target: str, server: Sequence[str], client: Sequence[str]) -> str:
    """What the client on one host prints, once the server on the other has said something (that it listens)."""
    serving = lab.start(target, server, stdout=subprocess.PIPE)
    assert serving.stdout is not None
    serving.stdout.readline()
    try:
        return lab.run(source, client, timeout_seconds=300)
    finally:
        serving.kill()
        serving.communicate()


def processor_seconds(lab: Lab) -> float:
    """Of the forwarder, so far."""
    pid: int = lab.world.forwarder_pid  # type: ignore[attr-defined]
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def answer() -> None:
    """Gives back every byte."""
    with socket.create_server(("0.0.0.0", PORT)) as listening:
        print("listening", flush=True)
        sock, _ = listening.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := sock.recv(64):
            sock.sendall(data)


def round_trips(address: str) -> None:
    """The median of some."""
    times = []
    with socket.create_connection((address, PORT)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(ROUND_TRIPS):
            began = time.perf_counter()
            sock.sendall(b"x")
            sock.recv(64)
            times.append(time.perf_counter() - began)
    print(statistics.median(times))


def sink(flows: str) -> None:
    """Reads, for whoever has no iperf3."""
    import threading

    def read(sock: socket.socket) -> None:
        buffer, count = memoryview(bytearray(CHUNK_BYTES)), 0
        while size := sock.recv_into(buffer):
            count += size
        sock.sendall(str(count).encode())
        sock.close()

    with socket.create_server(("0.0.0.0", PORT)) as listening:
        print("listening", flush=True)
        readers = [threading.Thread(target=read, args=(listening.accept()[0],)) for _ in range(int(flows))]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()


def plain_blast(address: str, seconds: str, flows: str) -> None:
    """Writes for some seconds; prints the bytes a second that arrived."""
    import threading

    data, arrived = bytes(CHUNK_BYTES), []

    def write() -> None:
        began = time.monotonic()
        with socket.create_connection((address, PORT)) as sock:
            while time.monotonic() - began < float(seconds):
                sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            arrived.append(int(sock.recv(64)) / (time.monotonic() - began))

    writers = [threading.Thread(target=write) for _ in range(int(flows))]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    print(sum(arrived))


# ---- the fabric


def measure_fabric(lab: Lab, latency_s: float, seconds: float, rounds: int) -> dict[str, object]:
    """Rounds of iperf3 and of the fabric in turn, from the first byte of a new connection to the last, slow start included."""
    from fabric import make_certificate

    tensors = max(2, round(seconds * LINK_BYTES_PER_S / TENSOR_BYTES))
    peer, ours = [], []
    with tempfile.TemporaryDirectory() as directory:
        make_certificate(Path(directory))
        for _ in range(rounds):
            peer.append(blast(lab, *SITES_APART, seconds, 1, warm_up=0))
            client = part("send_tensors", directory, lab.address(SITES_APART[1]), tensors)
            ours.append(8e-6 * float(ask(lab, *SITES_APART, part("take_tensors", directory), client)))
    return {
        "round trip ms": 2000 * latency_s,
        "peer": "iperf3" if has_iperf() else "plain socket (iperf3 is not installed)",
        "peer Mbit/s": statistics.median(peer),
        "fabric with TLS Mbit/s": statistics.median(ours),
        "ratio": statistics.median(a / b for a, b in zip(ours, peer, strict=True)),
        "must be": ">= 0.9",
    }


def take_tensors(directory: str) -> None:
    """The receiving side of the fabric."""
    import torch
    from fabric import Sink, server_context

    from atoll.fabric import Fabric, TcpCarrier

    torch.set_num_threads(1)
    with Fabric("receiver", services=[Sink()], carrier=TcpCarrier(server=server_context(Path(directory)))) as fabric:
        fabric.listen(f"0.0.0.0:{PORT}")
        print("listening", flush=True)
        time.sleep(3600)


def send_tensors(directory: str, address: str, count: str) -> None:
    """The sending side; prints bytes a second."""
    import torch
    from fabric import Item, Sink, client_context

    from atoll.fabric import Fabric, TcpCarrier

    torch.set_num_threads(1)
    tensor = torch.randn(TENSOR_BYTES // 4)
    carrier = TcpCarrier(client=client_context(Path(directory)), server_hostname="127.0.0.1")

    async def items():  # type: ignore[no-untyped-def]
        for _ in range(int(count)):
            yield Item(tensor)

    with Fabric("sender", carrier=carrier) as fabric:
        remote = fabric.connect(f"{address}:{PORT}")
        fabric.run(remote.connected())
        began = time.perf_counter()
        received = fabric.run(remote.call(Sink.take, items(), timeout_seconds=600))
        print(received / (time.perf_counter() - began))


PARTS: dict[str, Callable[..., None]] = {
    "answer": answer,
    "round_trips": round_trips,
    "sink": sink,
    "blast": plain_blast,
    "take_tensors": take_tensors,
    "send_tensors": send_tensors,
}

if __name__ == "__main__":
    try:
        main()
    except LabError as error:
        sys.exit(f"error: {error}")
