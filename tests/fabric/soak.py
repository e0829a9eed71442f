"""The long versions: a million inputs to the parser and the connection, 10,000 connections, a tensor larger than 2 GB.

python -m tests.fabric.soak [--inputs 1000000] [--cycles 10000] [--gigabytes 2.2]
"""

import argparse
import random
import resource
import time

import torch

from atoll.errors import FabricError, FrameError
from atoll.fabric import Fabric
from atoll.fabric.frame import Kind, pack_prefix
from atoll.fabric.headers import Credit, Failure, Goodbye, Message, Open, Ping, TensorHeader, encode_frame
from tests.fabric.parsing import feed_in_pieces, listening_connection
from tests.fabric.services import Named, Store
from tests.fabric.test_fabric import eventually
from tests.fabric.test_frame import HELLO
from tests.fabric.test_tcp import cycle, resources


def some_frame(draw: random.Random, opened: list[int]) -> bytes:
    """A frame that is right more often than not, nearly right, or not at all."""
    kind = draw.choice(list(Kind))
    size = draw.choice([0, 1, 100, 100, 70_000, 2**31, 2**62])
    tensors = tuple(TensorHeader(draw.choice(["float32", "int8"]), (draw.choice([0, 1, 50, 30_000]),)) for _ in range(draw.randrange(3)))
    message = Message(size, tensors, draw.random() < 0.3)
    opened[0] += 2 * (kind == Kind.OPEN)
    headers = {Kind.OPEN: Open("m", 1.0, message), Kind.MESSAGE: message, Kind.CREDIT: Credit(size, True), Kind.PING: Ping(size)}
    headers |= {Kind.FAIL: Failure("a", "b"), Kind.CANCEL: Failure("a", "b"), Kind.GOODBYE: Goodbye("x")}
    right = draw.random() < 0.9
    stream = max(opened[0], 1) if right else draw.choice([0, 1, 2, 3, 2**40, 2**64 - 1])
    whole = size + sum(tensor.shape[0] * (4 if tensor.dtype == "float32" else 1) for tensor in tensors)
    inline = bytes(whole) if whole < 60_000 and draw.random() < 0.7 else b""
    body = inline if kind in (Kind.OPEN, Kind.MESSAGE) else bytes(draw.choice([1, 100, 7_000])) if kind == Kind.CHUNK else b""
    frame = encode_frame(kind, stream, headers.get(kind if right else draw.choice(list(Kind))), body)
    if draw.random() < 0.1:
        place = draw.randrange(len(frame))
        frame = frame[:place] + draw.randbytes(1) + frame[place + 1 :]
    return (
        frame
        if draw.random() < 0.97
        else pack_prefix(draw.randrange(256), stream, draw.randrange(99), 0) + draw.randbytes(draw.randrange(60))
    )


def fuzz(inputs: int, seed: int) -> None:
    """Every input is one connection's worth of bytes: it is taken or refused, and memory stays where it was."""
    draw, refused, longest = random.Random(seed), 0, 0.0
    for number in range(inputs):
        connection, _ = listening_connection()
        opened = [-1]
        data = (HELLO if draw.random() < 0.9 else b"") + b"".join(some_frame(draw, opened) for _ in range(draw.randrange(1, 12)))
        start = time.thread_time()
        try:
            feed_in_pieces(connection, data, (draw.randrange(1, 3000) for _ in range(1000)))
        except FrameError as error:
            refused += 1
            connection.refuse(error)
        while parts := connection.outgoing(1 << 20):
            connection.sent(sum(map(len, parts)))
        longest = max(longest, time.thread_time() - start)
        if number % 50_000 == 0:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            print(f"{number} inputs, {refused} refused, longest {longest * 1000:.1f} ms, peak memory {peak} MB", flush=True)
    print(f"{inputs} inputs, {refused} refused, longest {longest * 1000:.1f} ms")


def come_and_go(times: int) -> None:
    """Connections that come and go leave no file, thread or task."""
    with Fabric("rome", services=[Store()]) as rome:
        address = rome.listen()
        cycle(address, 100)
        eventually(lambda: not rome._links)
        before, memory = resources(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        cycle(address, times)
        eventually(lambda: not rome._links and resources() <= before)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
        print(f"{times} connections: {before} files and threads before, {resources()} after, {len(rome._tasks)} tasks, {grown} KB grown")


def send_large(gigabytes: float) -> None:
    """A tensor that no 32-bit length holds."""
    with Fabric("rome", services=[Store()]) as rome, Fabric("oslo") as oslo:
        tensor = torch.arange(int(gigabytes * 1e9) // 8)
        try:
            reply = oslo.connect(rome.listen()).call_sync(Store.echo, Named("large", [tensor]))
        except FabricError as error:
            raise SystemExit(f"a tensor of {gigabytes} GB failed: {error}") from None
        assert torch.equal(reply.tensors[0], tensor)
        print(f"a tensor of {tensor.nbytes} bytes went there and back")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--cycles", type=int, default=10_000)
    parser.add_argument("--gigabytes", type=float, default=2.2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    send_large(arguments.gigabytes)
    come_and_go(arguments.cycles)
    fuzz(arguments.inputs, arguments.seed)
