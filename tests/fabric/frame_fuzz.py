"""Bytes from anybody, a million times: the frame parser and the connection behind it take them or refuse them, and nothing else.

python -m tests.fabric.frame_fuzz --inputs 1000000

With `atheris` (pip install atheris) the inputs are guided by the coverage of `atoll.fabric`; without, they are drawn at random. Either way
an input is a string of bytes: raw ones for the parser, or choices of which frames are built, right ones and nearly right ones. Prints the
number of inputs, of crashes, the slowest input and the peak of memory; an input that crashed is kept and run again with `--input FILE`.
"""

import argparse
import contextlib
import mmap
import os
import random
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import msgspec

_COUNTERS = struct.Struct("<QQd")  # inputs, refused, processor seconds of the slowest: shared with the process that fuzzes
_INSTRUMENT = ["atoll.fabric"]
_SLOWEST_SECONDS = 10.0  # of processor time for one input: by the clock, a busy machine would look like a hang
_MOST_MEMORY_MB = 2048


_SIZES = [0, 1, 100, 600, 70_000, 1 << 20, 2**31, 2**62]
_SHAPES: list[tuple[int, ...]] = [(), (0,), (3,), (2, 5), (30_000,), (2**40, 2**40), (0, 2**62), (1,) * 40]
_DTYPES = ["float32", "int8", "bool", "complex128", "bfloat16", "object"]
_METHODS = ["Store.echo", "", "x" * 5000]
_STREAMS = [1, 3, 5, 2, 0, 77, 2**64 - 1]


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
    from atoll.fabric.frame import Kind, encode_frame

    kinds = list(Kind)
    kind = kinds[choices.below(len(kinds))]
    stream = _STREAMS[choices.below(len(_STREAMS))]
    header, whole = build_header(kind if choices.below(16) else kinds[choices.below(len(kinds))], choices)
    body = choices.take(choices.below(100)) if kind in (Kind.OPEN, Kind.MESSAGE, Kind.CHUNK) else b""
    if whole <= 60_000 and choices.below(2):
        body = bytes(whole)
    frame = bytearray(encode_frame(kind, stream, header, body))
    if not choices.below(8):
        frame[choices.below(len(frame))] ^= 1 << choices.below(8)
    return bytes(frame)


def build_header(kind: int, choices: Choices) -> "tuple[msgspec.Struct | None, int]":
    """A header of a kind, and the bytes it announces."""
    from atoll.fabric.frame import CallMessage, Credit, Goodbye, Hello, Kind, Open, Ping, Pong, StreamFailure, TensorHeader

    size = _SIZES[choices.below(len(_SIZES))]
    match kind:
        case Kind.OPEN | Kind.MESSAGE:
            shapes = [(_DTYPES[choices.below(len(_DTYPES))], _SHAPES[choices.below(len(_SHAPES))]) for _ in range(choices.below(4))]
            message = CallMessage(size, tuple(TensorHeader(dtype, shape) for dtype, shape in shapes), bool(choices.below(2)))
            header = message if kind == Kind.MESSAGE else Open(_METHODS[choices.below(len(_METHODS))], 1.0, message)
            return header, _whole(size, message)
        case Kind.HELLO:
            return Hello("mallory", "worker", size, size, size, size, 1.0), 0
        case Kind.CREDIT:
            return Credit(size, bool(choices.below(2))), 0
        case Kind.PING:
            return Ping(size, float(size)), 0
        case Kind.PONG:
            return Pong(size), 0
        case Kind.FAIL | Kind.CANCEL:
            return StreamFailure("a", "b"), 0
        case Kind.GOODBYE:
            return Goodbye("x", bool(choices.below(2))), 0
    return None, 0


def _whole(size: int, message: object) -> int:
    from atoll.errors import FrameError
    from atoll.fabric.frame import CallMessage
    from atoll.fabric.stream import message_size

    assert isinstance(message, CallMessage)
    try:
        return message_size(message)
    except FrameError:
        return size


def run_input(data: bytes) -> bool:
    """One connection's worth; says whether it was refused. Anything but a FrameError of the connection is a crash."""
    from atoll.errors import FrameError, RefusedError
    from atoll.fabric.frame import Hello, Kind, encode_frame
    from atoll.fabric.payload import decode_payload
    from tests.fabric.parsing import feed_in_pieces, listening_connection
    from tests.fabric.services import Named

    choices = Choices(data)
    connection, heard = listening_connection()
    mode = choices.below(4)
    pieces = [1 + choices.below(1000) for _ in range(4)]
    hello = Hello("mallory", "worker", 1 << 20, 1 << 20, 1 << 20, 1 << 20, 1.0)
    wire = b"" if mode == 0 else encode_frame(Kind.HELLO, 0, hello)
    wire += choices.take(4096) if mode < 2 else b""
    refused = False
    try:
        feed_in_pieces(connection, wire, pieces)
        while choices.left:
            feed_in_pieces(connection, b"".join(build_frame(choices) for _ in range(1 + choices.below(3))), pieces)
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
    limits = ["-timeout=86400", f"-rss_limit_mb={_MOST_MEMORY_MB}", "-max_len=700", "-verbosity=0"]
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
    start = time.thread_time()
    refused = run_input(data)
    done, bad, slowest = _COUNTERS.unpack_from(counters)
    _COUNTERS.pack_into(counters, 0, done + 1, bad + refused, max(slowest, time.thread_time() - start))


def report(inputs: int, seed: int, engine: str) -> int:
    """Runs an engine and prints what came of it; 0 if nothing crashed."""
    folder = Path(tempfile.mkdtemp(prefix="frame-fuzz-"))
    (folder / "counters").write_bytes(bytes(_COUNTERS.size))
    command = [sys.executable, "-m", "tests.fabric.frame_fuzz", "--inputs", str(inputs), "--seed", str(seed)]
    start = time.monotonic()
    child = subprocess.Popen([*command, "--engine", engine, "--folder", str(folder)])
    hung, usage = _watch(child, folder / "counters")
    done, refused, slowest = _COUNTERS.unpack((folder / "counters").read_bytes())
    crashes = [path for path in folder.iterdir() if path.name.startswith(("crash", "timeout", "oom", "leak"))]
    print(
        f"{done} inputs ({engine}), {refused} refused, {len(crashes)} crashes, {'1 hang' if hung else 'no hang'}, "
        f"the slowest input {slowest * 1000:.0f} ms of processor time, peak memory {usage.ru_maxrss // 1024} MB, "
        f"{time.monotonic() - start:.0f} s"
    )
    for path in crashes:
        print(f"crashed: {path}")
    if not crashes:
        shutil.rmtree(folder)
    return 0 if child.returncode == 0 and not hung and not crashes and done >= inputs else 1


def _watch(child: "subprocess.Popen[bytes]", counters: Path) -> tuple[bool, resource.struct_rusage]:
    """Until the engine ends; ends it when it computes without getting any further. Says whether it did, and what it used."""
    before, since = -1, 0.0
    while True:
        pid, status, usage = os.wait4(child.pid, os.WNOHANG)
        if pid:
            child.returncode = os.waitstatus_to_exitcode(status)
            return False, usage
        done, used = _COUNTERS.unpack(counters.read_bytes())[0], _processor_seconds(child.pid)
        if done != before or done == 0:  # the first is preceded by imports
            before, since = done, used
        elif used - since > _SLOWEST_SECONDS:
            child.kill()
            _, status, usage = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
            return True, usage
        time.sleep(0.5)


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
