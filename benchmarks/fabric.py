"""What the fabric costs: 16 MB tensors on loopback against plain blocking sockets, with and without TLS 1.3; the time of a small call.

Sender and receiver are two processes. Rounds of the fabric and of its peers alternate, so that a busy machine slows both; the table shows
medians over rounds and the median of the ratios of neighbouring rounds. Processor seconds per GiB are of both processes.

    python benchmarks/fabric.py [--rounds 7] [--json]
"""

import argparse
import datetime
import ipaddress
import multiprocessing
import multiprocessing.connection
import os
import resource
import socket
import ssl
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import torch
from report import print_json, print_table

from atoll.fabric import CallingPeer, Fabric, TcpCarrier

TENSOR_BYTES = 16_000_000
TENSORS = 48
CALLS = 400
Pipe = multiprocessing.connection.Connection


class Item(msgspec.Struct):
    """One message."""

    tensor: torch.Tensor


class Sink:
    """Receives."""

    async def take(self, items: AsyncIterator[Item], peer: CallingPeer) -> int:
        """Counts what it gets."""
        return sum([item.tensor.nbytes async for item in items])

    async def echo(self, data: bytes, peer: CallingPeer) -> bytes:
        """Gives back what it gets."""
        return data


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        make_certificate(Path(directory))
        throughput = [measure_throughput(Path(directory), tls, arguments.rounds) for tls in (False, True)]
        calls = [measure_calls(Path(directory), tls, arguments.rounds) for tls in (False, True)]
    if arguments.json:
        print_json({"throughput": throughput, "calls": calls})
    else:
        for title, rows in ("16 MB tensors over one connection on loopback", throughput), ("a call with 4 KB there and back", calls):
            print_table(title, list(rows[0]), [list(row.values()) for row in rows])


# ---- throughput


def measure_throughput(directory: Path, tls: bool, rounds: int) -> dict[str, object]:
    """Rounds of a blocking socket and of the fabric in turn."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    receiver = multiprocessing.get_context("spawn").Process(target=receive, args=(theirs, directory, tls), daemon=True)
    receiver.start()
    raw_port, fabric_address = ours.recv()
    tensor = torch.randn(TENSOR_BYTES // 4)
    raw, fabric, raw_cpu, fabric_cpu = [], [], [], []
    with Fabric("sender", carrier=TcpCarrier(client=client_context(directory) if tls else None)) as sender:
        remote = sender.connect(fabric_address)
        sender.run(remote.connected())
        for round_number in range(rounds + 1):
            one = timed(ours, lambda: send_raw(raw_port, tensor, directory, tls))
            two = timed(ours, lambda: sender.run(send_fabric(remote, tensor)))
            if round_number:  # the first warms up
                raw.append(one[0])
                raw_cpu.append(one[1])
                fabric.append(two[0])
                fabric_cpu.append(two[1])
    receiver.terminate()
    receiver.join()
    gib = TENSOR_BYTES * TENSORS / 2**30
    return {
        "wire": "TLS 1.3" if tls else "plain",
        "blocking socket GiB/s": gib / statistics.median(raw),
        "fabric GiB/s": gib / statistics.median(fabric),
        "ratio": statistics.median(a / b for a, b in zip(raw, fabric, strict=True)),
        "ratio of processor time": statistics.median(a / b for a, b in zip(raw_cpu, fabric_cpu, strict=True)),
        "must be": ">= 0.8",
    }


def timed(pipe: Pipe, action: object) -> tuple[float, float]:
    """Seconds of wall and of processor time, both processes."""
    assert callable(action)
    before, start = processor_seconds(pipe), time.perf_counter()
    action()
    return time.perf_counter() - start, processor_seconds(pipe) - before


def processor_seconds(pipe: Pipe) -> float:
    """Of this process and of the receiver."""
    pipe.send("processor seconds")
    other: float = pipe.recv()
    return own_seconds() + other


def own_seconds() -> float:
    """Of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def send_raw(port: int, tensor: torch.Tensor, directory: Path, tls: bool) -> None:
    """Everything through a blocking socket."""
    sock = socket.create_connection(("127.0.0.1", port))
    if tls:
        sock = client_context(directory).wrap_socket(sock, server_hostname="127.0.0.1")
    view = memoryview(tensor.numpy()).cast("B")
    for _ in range(TENSORS):
        sock.sendall(view)
    assert sock.recv(1) == b"x"
    sock.close()


async def send_fabric(remote: object, tensor: torch.Tensor) -> None:
    """Everything through one streaming call."""

    async def items() -> AsyncIterator[Item]:
        for _ in range(TENSORS):
            yield Item(tensor)

    received = await remote.call(Sink.take, items(), timeout_seconds=600)  # type: ignore[attr-defined]
    assert received == TENSORS * tensor.nbytes


def receive(pipe: Pipe, directory: Path, tls: bool) -> None:
    """The other process."""
    torch.set_num_threads(1)
    context = server_context(directory) if tls else None
    listening = socket.create_server(("127.0.0.1", 0))
    fabric = Fabric("receiver", services=[Sink()], carrier=TcpCarrier(server=context))
    pipe.send((listening.getsockname()[1], fabric.listen()))
    while True:
        ready = multiprocessing.connection.wait([pipe, listening])
        if pipe in ready:
            try:
                pipe.recv()
            except EOFError:
                return
            pipe.send(own_seconds())
        if listening in ready:
            receive_raw(listening, context)


def receive_raw(listening: socket.socket, context: ssl.SSLContext | None) -> None:
    """One round of a blocking socket."""
    sock, _ = listening.accept()
    if context is not None:
        sock = context.wrap_socket(sock, server_side=True)
    view = memoryview(bytearray(TENSOR_BYTES))
    for _ in range(TENSORS):
        position = 0
        while position < TENSOR_BYTES:
            position += sock.recv_into(view[position:])
    sock.sendall(b"x")
    sock.close()


# ---- small calls


def measure_calls(directory: Path, tls: bool, rounds: int) -> dict[str, object]:
    """Round trips of 4 KB, from a coroutine and from training code."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    receiver = multiprocessing.get_context("spawn").Process(target=receive, args=(theirs, directory, tls), daemon=True)
    receiver.start()
    _, address = ours.recv()
    data = os.urandom(4096)

    async def in_the_loop() -> list[float]:
        times = []
        for _ in range(CALLS):
            start = time.perf_counter()
            await remote.call(Sink.echo, data, timeout_seconds=60)
            times.append(time.perf_counter() - start)
        return times

    def outside() -> list[float]:
        times = []
        for _ in range(CALLS):
            start = time.perf_counter()
            remote.call_sync(Sink.echo, data, timeout_seconds=60)
            times.append(time.perf_counter() - start)
        return times

    with Fabric("sender", carrier=TcpCarrier(client=client_context(directory) if tls else None)) as sender:
        remote = sender.connect(address)
        sender.run(remote.connected())
        coroutine, training = [], []
        for _ in range(rounds):
            coroutine += sender.run(in_the_loop())
            training += outside()
    receiver.terminate()
    receiver.join()
    return {
        "wire": "TLS 1.3" if tls else "plain",
        "median ms": 1000 * statistics.median(coroutine),
        "90% ms": 1000 * statistics.quantiles(coroutine, n=10)[-1],
        "median ms, synchronous": 1000 * statistics.median(training),
        "must be": "<= 0.5 ms",
    }


# ---- TLS


def make_certificate(directory: Path) -> None:
    """A self-signed certificate of 127.0.0.1."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "benchmark")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (directory / "both.pem").write_bytes(private + certificate.public_bytes(serialization.Encoding.PEM))


def server_context(directory: Path) -> ssl.SSLContext:
    """TLS 1.3 for whoever accepts."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(directory / "both.pem")
    return context


def client_context(directory: Path) -> ssl.SSLContext:
    """TLS 1.3 for whoever dials."""
    context = ssl.create_default_context(cafile=str(directory / "both.pem"))
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


if __name__ == "__main__":
    main()
