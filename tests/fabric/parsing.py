"""A handler that keeps what the parser tells it, and ways to hand bytes over; for the tests of frames and for the soak."""

from collections.abc import Iterable

from atoll.errors import FabricError
from atoll.fabric.connection import Connection, ConnectionSettings
from atoll.fabric.frame import FrameLimits, FrameParser, Hello, Prefix
from atoll.fabric.liveness import Verdict
from atoll.fabric.stream import IncomingMessage


class Collector:
    """Keeps whole frames."""

    def __init__(self, discard: bool = False) -> None:
        self.frames: list[tuple[Prefix, bytes, bytes]] = []
        self._discard = discard
        self._header = b""
        self._body = bytearray()

    def begin_frame(self, prefix: Prefix, header: bytes) -> list[memoryview] | None:
        self._header, self._body = header, bytearray(prefix.body_bytes)
        if self._discard:
            return None
        view, half = memoryview(self._body), prefix.body_bytes // 2
        return [view[:half], view[half:]]

    def finish_frame(self, prefix: Prefix) -> None:
        self.frames.append((prefix, self._header, bytes(self._body)))


class Silent:
    """ConnectionEvents and StreamHandler of a peer that only listens, taking everything at once."""

    connection: Connection

    def __init__(self) -> None:
        self.messages: list[IncomingMessage] = []
        self.failures: list[FabricError] = []
        self.closed: FabricError | None = None

    def on_greeted(self, hello: Hello) -> None: ...
    def on_state(self, verdict: Verdict) -> None: ...
    def on_settled(self, at_once: bool) -> None: ...
    def on_announced(self, size_bytes: int) -> None: ...
    def on_end(self) -> None: ...

    def on_opened(self, stream: int, method: str, timeout_seconds: float) -> "Silent":
        return self

    def on_message(self, message: IncomingMessage) -> None:
        self.messages.append(message)

    def on_failed(self, error: FabricError) -> None:
        self.failures.append(error)

    def on_closed(self, error: FabricError) -> None:
        self.closed = error


def listening_connection(**limits: int) -> tuple[Connection, Silent]:
    """A connection that accepts little, for bytes from anybody."""
    events = Silent()
    settings = ConnectionSettings(
        name="rome",
        bulk_window_bytes=limits.get("bulk", 1 << 20),
        control_window_bytes=1 << 18,
        stream_window_bytes=1 << 19,
        message_bytes=limits.get("message", 1 << 20),
        frames=FrameLimits(header_bytes=1 << 12, body_bytes=1 << 16),
    )
    connection = Connection(settings, events, lambda: 0.0, dialled=False)
    events.connection = connection
    return connection, events


def feed_in_pieces(parser: FrameParser | Connection, data: bytes, sizes: Iterable[int] = ()) -> None:
    """As a socket would: some bytes into the buffers, again and again; all at once where there are no sizes."""
    sizes = iter(sizes)
    while data:
        size = max(1, next(sizes, len(data)))
        written = 0
        for buffer in parser.buffers():
            part = data[written : written + min(len(buffer), size - written)]
            buffer[: len(part)] = part
            written += len(part)
            if len(part) < len(buffer):
                break
        data = data[written:]
        parser.filled(written)
