"""Bytes from anybody, a million times: the frame parser and the connection behind it take them or refuse them, and nothing else.

python -m tests.fabric.frame_fuzz --inputs 1000000

With `atheris` (pip install atheris) the inputs are guided by the coverage of `atoll.fabric`; without, they are drawn at random. Either way
an input is a string of bytes: raw ones for the parser, or choices of which frames are built, right ones and nearly right ones. Prints the
number of inputs, of crashes and the peak of memory; an input that crashed is kept and run again with `--input FILE`.
"""

import argparse
import contextlib
import mmap
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_COUNTERS = struct.Struct("<QQ")  # inputs, refused: shared with the process that fuzzes
_INSTRUMENT = ["atoll.fabric"]
_SLOWEST_SECONDS = 20
_MOST_MEMORY_MB = 2048


class Choices:
    """Decisions taken from an input's bytes; zeros once they are used up."""

    def __init__(self, data: bytes) -> None:
        self._data, self._place = data, 0

    @property
    def left(self) -> bool:
        """Whether there is anything to decide with."""
        return self._place < len(self._data)

    def below(self, limit: int) -> int:
        """From 0 up to the limit."""
        return int.from_bytes(self.take(1 if limit <= 256 else 4), "little") % limit

    def take(self, count: int) -> bytes:
        """The next bytes as they are."""
        part = self._data[self._place : self._place + count]
        self._place += count
        return part


def build_frame(choices: Choices) -> bytes:
    """A frame that is right, or wrong in one of many ways."""
    from atoll.fabric.frame import Kind
    from atoll.fabric.headers import Credit, Failure, Goodbye, Hello, Message, Open, Ping, Pong, TensorHeader, encode_frame

    sizes = [0, 1, 100, 600, 70_000, 1 << 20, 2**31, 2**62]
    size = sizes[choices.below(len(sizes))]
    shapes: list[tuple[int, ...]] = [(), (0,), (3,), (2, 5), (30_000,), (2**40, 2**40), (0, 2**62), (1,) * 40]
    dtypes = ["float32", "int8", "bool", "complex128", "bfloat16", "object"]
    tensors = tuple(TensorHeader(dtypes[choices.below(len(dtypes))], shapes[choices.below(len(shapes))]) for _ in range(choices.below(4)))
    message = Message(size, tensors, bool(choices.below(2)))
    methods = ["Store.echo", "", "x" * 5000]
    headers = {
        Kind.HELLO: Hello("mallory", "worker", size, size, size, size, 1.0),
        Kind.OPEN: Open(methods[choices.below(3)], 1.0, message),
        Kind.MESSAGE: message,
        Kind.CREDIT: Credit(size, bool(choices.below(2))),
        Kind.PING: Ping(size, float(size)),
        Kind.PONG: Pong(size),
        Kind.FAIL: Failure("a", "b"),
        Kind.CANCEL: Failure("a", "b"),
        Kind.GOODBYE: Goodbye("x", bool(choices.below(2))),
    }
    kinds = list(Kind)
    kind = kinds[choices.below(len(kinds))]
    stream = [1, 3, 5, 2, 0, 77, 2**64 - 1][choices.below(7)]
    body = choices.take(choices.below(300)) if kind in (Kind.OPEN, Kind.MESSAGE, Kind.CHUNK) else b""
    if choices.below(4) == 0 and size <= 70_000:
        body = bytes(min(_whole(size, message), 60_000))
    frame = bytearray(encode_frame(kind, stream, headers.get(kind if choices.below(16) else kinds[choices.below(len(kinds))]), body))
    if not choices.below(8):
        frame[choices.below(len(frame))] ^= 1 << choices.below(8)
    return bytes(frame)


def _whole(size: int, message: object) -> int:
    from atoll.errors import FrameError
    from atoll.fabric.headers import Message
    from atoll.fabric.stream import message_size

    assert isinstance(message, Message)
    try:
        return message_size(message)
    except FrameError:
        return size


def run_input(data: bytes) -> bool:
    """One connection's worth; says whether it was refused. Anything but a FrameError of the connection is a crash."""
    from atoll.errors import FrameError, RefusedError
    from atoll.fabric.frame import Kind
    from atoll.fabric.headers import Hello, encode_frame
    from atoll.fabric.payload import decode_payload
    from tests.fabric.parsing import feed_in_pieces, listening_connection
    from tests.fabric.services import Named

    choices = Choices(data)
    connection, heard = listening_connection()
    mode = choices.below(4)
    pieces = [1 + choices.below(1000) for _ in range(4)]
    hello = Hello("mallory", "worker", 1 << 20, 1 << 20, 1 << 20, 1 << 20, 1.0)
    wire = b"" if mode == 0 else encode_frame(Kind.HELLO, 0, hello)
    wire += choices.take(1 << 16) if mode < 2 else b""
    while choices.left and len(wire) < 1 << 20:
        wire += build_frame(choices)
    refused = False
    try:
        feed_in_pieces(connection, wire, pieces * 50)
    except FrameError as error:
        refused = True
        connection.refuse(error)
    for message in heard.messages:
        with contextlib.suppress(RefusedError):
            decode_payload(message.payload, message.tensors, Named)
        connection.taken(message)
    while parts := connection.outgoing(1 << 20):
        connection.sent(sum(map(len, parts)))
    for window in connection._unread.values():
        assert window.used_bytes <= max(window.limit_bytes, 1 << 20), "more unread than was granted"
    return refused


# ---- engines: each runs in a process of its own, and counts in memory shared with the one that reports


def fuzz_guided(inputs: int, seed: int, counters: mmap.mmap, folder: Path) -> None:
    """By coverage, with atheris."""
    import atheris

    with atheris.instrument_imports(include=_INSTRUMENT):
        import tests.fabric.parsing  # noqa: F401 - imports what is fuzzed

    corpus = folder / "corpus"
    corpus.mkdir()
    draw = random.Random(seed)
    for number in range(200):
        (corpus / str(number)).write_bytes(draw.randbytes(draw.randrange(1, 400)))
    limits = [f"-timeout={_SLOWEST_SECONDS}", f"-rss_limit_mb={_MOST_MEMORY_MB}", "-max_len=4096", "-verbosity=0"]
    run = [f"-runs={inputs}", f"-seed={seed + 1}", f"-artifact_prefix={folder}/", "-print_final_stats=0"]
    atheris.Setup([sys.argv[0], *limits, *run, str(corpus)], lambda data: _counted(data, counters))
    atheris.Fuzz()


def fuzz_at_random(inputs: int, seed: int, counters: mmap.mmap, folder: Path) -> None:
    """Without guidance."""
    draw = random.Random(seed)
    for _ in range(inputs):
        data = draw.randbytes(draw.randrange(1, 600))
        try:
            _counted(data, counters)
        except BaseException:
            (folder / "crash-random").write_bytes(data)
            raise


def _counted(data: bytes, counters: mmap.mmap) -> None:
    refused = run_input(data)
    done, bad = _COUNTERS.unpack_from(counters)
    _COUNTERS.pack_into(counters, 0, done + 1, bad + refused)


def report(inputs: int, seed: int, engine: str) -> int:
    """Runs an engine and prints what came of it; 0 if nothing crashed."""
    folder = Path(tempfile.mkdtemp(prefix="frame-fuzz-"))
    (folder / "counters").write_bytes(bytes(_COUNTERS.size))
    command = [sys.executable, "-m", "tests.fabric.frame_fuzz", "--inputs", str(inputs), "--seed", str(seed)]
    start = time.monotonic()
    child = subprocess.Popen([*command, "--engine", engine, "--folder", str(folder)])
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    done, refused = _COUNTERS.unpack((folder / "counters").read_bytes())
    crashes = [path for path in folder.iterdir() if path.name.startswith(("crash", "timeout", "oom", "leak"))]
    print(
        f"{done} inputs ({engine}), {refused} refused, {len(crashes)} crashes, peak memory {usage.ru_maxrss // 1024} MB, "
        f"{time.monotonic() - start:.0f} s"
    )
    for path in crashes:
        print(f"crashed: {path}")
    return 0 if child.returncode == 0 and not crashes and done >= inputs else 1


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=["atheris", "random"], default=None)
    parser.add_argument("--input", type=Path, help="run one input that was kept")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # this process is the one that fuzzes
    arguments = parser.parse_args()
    if arguments.input is not None:
        print("refused" if run_input(arguments.input.read_bytes()) else "taken")
        return 0
    if arguments.folder is None:
        return report(arguments.inputs, arguments.seed, arguments.engine or ("atheris" if _has_atheris() else "random"))
    with (arguments.folder / "counters").open("r+b") as file:
        counters = mmap.mmap(file.fileno(), _COUNTERS.size)
        engine = fuzz_guided if arguments.engine == "atheris" else fuzz_at_random
        engine(arguments.inputs, arguments.seed, counters, arguments.folder)
    return 0


def _has_atheris() -> bool:
    import importlib.util

    return importlib.util.find_spec("atheris") is not None


if __name__ == "__main__":
    sys.exit(main())
