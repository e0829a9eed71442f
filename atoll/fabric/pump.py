"""TCP, with or without TLS: a thread drives the connection, and whoever has the turn owns its socket: an SSL object is never used by two.

The socket does not block: the thread sleeps in poll() on it and on a pipe by which other threads wake it, and moves up to a few megabytes
each time it wakes. Bodies are read straight into tensors. While only small frames come, the event loop listens to the socket itself: a
call then wakes no thread but the loop's. The pump's thread still reads once a heart-beat, so that a busy loop does not look dead.
"""

import asyncio
import contextlib
import os
import select
import socket
import ssl
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable

from atoll.errors import FabricError, FrameError, PeerLostError, RefusedError
from atoll.fabric.connection import Connection
from atoll.fabric.shaped import ShapedOutlet
from atoll.fabric.tls import tls_failure

__all__ = ["TcpPump", "prepare_socket"]

_TURN_BYTES = 4 << 20  # read before looking whether something is to be sent
_SEND_BYTES = 4 << 20  # offered to the kernel at once: fewer calls are cheaper
_RECORD_BYTES = 16 * 1024  # of TLS
_BUFFERS = 64  # for one system call
_UNSENT_BYTES = 256 * 1024  # in the kernel and not yet on the wire, before it stops accepting more; on a fast link rather
_UNSENT_SECONDS = 0.01  # of its throughput, up to
_MOST_UNSENT_BYTES = 8 << 20
_MOST_AWAITED_BYTES = 256 * 1024  # to arrive before the thread is woken
_FEWEST_AWAITED_BYTES = 8 * 1024  # for which asking the kernel to wait is worth a call
_LAST_WORDS_SECONDS = 1.0
_QUIET_SECONDS = 0.05  # without bulk, after which the event loop listens
_LOOP_BYTES = 64 * 1024  # read by the event loop at a time
_TCP_NOTSENT_LOWAT = 25
_TCP_INFO_LAST_ACK = 56  # where tcp_info keeps the milliseconds since an acknowledgement came (Linux, uapi/linux/tcp.h)


def prepare_socket(sock: socket.socket, user_timeout_seconds: float) -> None:
    """Sets what the fabric wants of a TCP socket: no delay, little unsent in the kernel, an end when a peer no longer acknowledges."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(user_timeout_seconds * 1000))
    _limit_unsent(sock, _UNSENT_BYTES)


def _limit_unsent(sock: socket.socket, size_bytes: int) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # an old kernel: control messages may then wait behind what the kernel holds
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, size_bytes)


class TcpPump:
    """Drives one connection over one socket in a thread of its own, until the wire ends or `close` is called.

    `establish` connects (or takes what was accepted) and shakes hands; it runs in the thread and may block up to its own time limits.
    """

    def __init__(
        self,
        connection: Connection,
        establish: Callable[["TcpPump"], socket.socket],
        clock: Callable[[], float],
        outlet: ShapedOutlet | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.connection = connection
        self.certificate: bytes | None = None  # of the peer, once hands were shaken
        self.address = ""  # of the peer, once known
        self._establish = establish
        self._clock = clock
        self._outlet = outlet or connection  # where to get what is sent
        self._actions: deque[Callable[[], None]] = deque()
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)
        self._wake_lock = threading.Lock()
        self._woken = False
        self._over = False
        self._turn = threading.Lock()  # who has it owns the connection and the socket
        self._sock: socket.socket | None = None  # once connected, until the end
        self._failure: FabricError | OSError | None = None  # met by another thread that had the turn
        self._unsent_bytes = _UNSENT_BYTES
        self._awaited_bytes = 1  # that the kernel waits for before it wakes the thread
        self._in_records = 0  # bytes of a body that TLS may have taken from the kernel already, without giving them on
        self._read, self._write = self._read_plain, self._write_plain
        self._loop = loop
        self._loop_listens = False  # the thread need not
        self._polls = True  # the thread's poll() is about to wait for bytes
        self._registered = False  # with the loop; changed there only
        self._asked = False  # the loop, to listen
        self._busy_at = -_QUIET_SECONDS  # when bulk was last under way
        self._joined: memoryview | None = None  # what TLS refused to take and must be offered again as it was
        self.thread = threading.Thread(target=self._run, name=f"fabric {connection.settings.name}", daemon=True)

    def start(self) -> None:
        """Begins."""
        self.thread.start()

    def submit(self, action: Callable[[], None]) -> None:
        """Has the connection's owner do something with it. After the end nobody owns it, and it is done at once.

        While the pump's thread sleeps, the caller's owns the connection and sends small things itself: no thread need wake up for them.
        """
        self._actions.append(action)
        if not self._turn.acquire(blocking=False):
            self._wake()
            return
        try:
            self._act_for_the_thread()
            self.connection.settle()
        finally:
            self._turn.release()
        if self._actions:  # another thread came while this one had the turn
            self._wake()

    def _act_for_the_thread(self) -> None:
        if self._over:
            self._act()
        elif self._sock is None or self._failure is not None:
            self._wake()
        else:
            try:
                self._act()
                if not self.connection.bulk_waiting and self._outlet.waiting:
                    self._write(self._sock)
            except Exception as error:
                self._failure = _failure(error)
            if self._failure is not None or self.connection.finishing or self._outlet.due_seconds(self._clock()) is not None:
                self._wake()

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            with self._wake_lock:
                if not self._over:
                    with contextlib.suppress(BlockingIOError):
                        os.write(self._wake_writer, b"\0")

    # ---- in the event loop

    def _listen(self) -> None:
        """Begins to listen, unless there is something to do for the thread just now: it asks again."""
        self._asked = False
        if self._loop is None or not self._turn.acquire(blocking=False):
            return
        try:
            if self._sock is not None and not self._busy() and not self._registered:
                self._await(self._sock, 1)
                self._loop.add_reader(self._sock, self._on_readable)
                self._registered = self._loop_listens = True
        finally:
            self._turn.release()
        self._wake()

    def _stop_listening(self) -> None:
        sock = self._sock
        if self._registered and self._loop is not None and sock is not None:
            self._loop.remove_reader(sock)
            self._registered = False
        self._loop_listens = False

    def _on_readable(self) -> None:
        if not self._turn.acquire(blocking=False):  # the thread is at work, perhaps for long
            self._stop_listening()
            self._wake()
            return
        try:
            if self._sock is None:
                return
            try:
                self._read(self._sock, _LOOP_BYTES)
                self._act()
                if self._outlet.waiting and not self._busy():
                    self._write(self._sock)
            except Exception as error:
                self._failure = _failure(error)
            if self._busy() or self._failure is not None or self.connection.finishing:
                self._stop_listening()
                self._wake()
            elif self._outlet.due_seconds(self._clock()) is not None:
                self._wake()
        finally:
            self._turn.release()
        if self._actions:
            self._wake()
        self.connection.settle(at_once=True)

    def _release(self, sock: socket.socket) -> None:
        """Closes the socket, in the loop if that listens to it."""

        def close() -> None:
            self._loop.remove_reader(sock)  # type: ignore[union-attr]
            sock.close()

        with self._turn:
            self._sock = None
            if self._registered and self._loop is not None:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(close)
                    return
            sock.close()

    # ---- the thread

    def _run(self) -> None:
        sock: socket.socket | None = None
        ended: FabricError = PeerLostError("the connection was closed")
        try:
            sock = self._establish(self)
            if isinstance(sock, ssl.SSLSocket):
                self.certificate = sock.getpeercert(binary_form=True)
                self._read, self._write = self._read_tls, self._write_tls
                self._in_records = 2 * _RECORD_BYTES
            sock.setblocking(False)
            with self._turn:
                self._sock = sock
                self._drive(sock)
        except FabricError as error:
            ended = error
        except ssl.SSLError as error:
            ended = tls_failure(error, self.address)
        except (ConnectionResetError, BrokenPipeError) as error:  # how the end of a process looks that had not read everything
            ended = PeerLostError(f"{error.strerror}: its process ended or was killed, or it closed the connection unread")
        except OSError as error:
            ended = PeerLostError(error.strerror or str(error) or type(error).__name__)
        except Exception as error:  # what is arriving can no longer be told from what was lost
            ended = FabricError(f"an error in this process: {type(error).__name__}: {error}")
        finally:
            if sock is not None:
                self._release(sock)
            self._end(ended)

    def _end(self, error: FabricError) -> None:
        """The wire is over: everybody is told, and what was asked for since is answered with that."""
        with self._turn:
            self.connection.lost(error)
            with self._wake_lock:
                if not self._over:
                    self._over = True
                    os.close(self._wake_reader)
                    os.close(self._wake_writer)
            self._act()
            self.connection.settle()

    def _drive(self, sock: socket.socket) -> None:
        poll = select.poll()
        poll.register(self._wake_reader, select.POLLIN)
        connection, outlet, wanted, next_tick = self.connection, self._outlet, 0, 0.0
        try:
            while connection.ended is None:
                self._act()
                now = self._clock()
                if now >= next_tick:
                    next_tick = connection.tick(now, _acknowledged(sock, now, connection))
                    self._adapt(sock)
                blocked = outlet.waiting and self._write(sock)
                if connection.finishing:
                    return self._last_words(sock)
                self._share(now)
                self._polls = not self._loop_listens
                events = (select.POLLIN if self._polls else 0) | (select.POLLOUT if blocked else 0)
                if events != wanted:
                    poll.register(sock, events) if events else poll.unregister(sock)
                    wanted = events
                if not self._loop_listens:
                    self._await_bytes(sock)
                ready = self._sleep(poll, self._pause_seconds(next_tick, blocked))
                late = not ready and (self._awaited_bytes > 1 or self._loop_listens)  # what is there is a sign of life, however little
                if late or any(fd != self._wake_reader for fd, _ in ready):
                    self._read(sock, _TURN_BYTES)
        except (FrameError, RefusedError) as error:
            connection.refuse(error)
            self._last_words(sock)

    def _busy(self) -> bool:
        return self.connection.bulk_waiting or self.connection.bulk_arriving

    def _share(self, now: float) -> None:
        """Leaves listening to the loop where only small things come, and takes it back with the first large one."""
        if self._busy():
            self._busy_at = now
            if self._loop_listens and self._loop is not None:
                self._loop_listens = False
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._stop_listening)
        elif self._loop is not None and not self._loop_listens and not self._asked and now - self._busy_at >= _QUIET_SECONDS:
            with contextlib.suppress(RuntimeError):
                self._asked = True
                self._loop.call_soon_threadsafe(self._listen)

    def _await_bytes(self, sock: socket.socket) -> None:
        """Has the kernel wake this thread once the rest of a chunk is there, not for each segment. What is not begun never waits."""
        rest = min(self.connection.body_bytes_due - self._in_records, _MOST_AWAITED_BYTES)
        self._await(sock, rest if rest >= _FEWEST_AWAITED_BYTES else 1)

    def _await(self, sock: socket.socket, awaited: int) -> None:
        if awaited != self._awaited_bytes and sys.platform == "linux" and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, awaited)
            self._awaited_bytes = awaited

    def _sleep(self, poll: select.poll, seconds: float) -> list[tuple[int, int]]:
        """Waits for the socket or a wake-up. Meanwhile the turn is free: whoever submits something may send it."""
        self._woken = False
        self.connection.settle()
        if self._actions or self._polls == self._loop_listens:  # what woke it in between left no byte in the pipe
            return []
        self._turn.release()
        try:
            ready = poll.poll(seconds * 1000)
        finally:
            self._turn.acquire()
        if any(fd == self._wake_reader for fd, _ in ready):
            os.read(self._wake_reader, 4096)
        if self._failure is not None:
            raise self._failure
        return ready

    def _pause_seconds(self, next_tick: float, blocked: bool) -> float:
        now = self._clock()
        due = None if blocked else self._outlet.due_seconds(now)
        return max(0.0, min(next_tick - now, next_tick if due is None else due))

    def _act(self) -> None:
        while self._actions:
            self._actions.popleft()()

    def _adapt(self, sock: socket.socket) -> None:
        """Lets the kernel hold more unsent bytes on a fast link, where they delay nobody and save wake-ups."""
        unsent = int(min(max(_UNSENT_SECONDS * self.connection.estimate.outgoing_bytes_per_s, _UNSENT_BYTES), _MOST_UNSENT_BYTES))
        if not unsent / 2 <= self._unsent_bytes <= unsent * 2:
            self._unsent_bytes = unsent
            _limit_unsent(sock, unsent)

    def _last_words(self, sock: socket.socket) -> None:
        """Sends what is still outgoing (a goodbye, or why the peer was refused), but not for long, and lets the peer read it."""
        end = self._clock() + _LAST_WORDS_SECONDS
        poll = select.poll()
        poll.register(sock, select.POLLOUT)
        while self._outlet.due_seconds(self._clock()) is not None and self._clock() < end:
            poll.poll(50 if self._write(sock) else 1)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
        poll.modify(sock, select.POLLIN)
        rest = bytearray(65536)
        with contextlib.suppress(OSError):  # unread bytes at close would make the kernel reset, and the peer lose our words
            while self._clock() < end and poll.poll(50) and socket.socket.recv_into(sock, rest):
                pass

    # ---- moving bytes

    def _read_plain(self, sock: socket.socket, budget: int) -> None:
        connection = self.connection
        while budget > 0 and not connection.finishing:
            buffers = connection.buffers()[:_BUFFERS]
            room = sum(map(len, buffers))
            try:
                count = sock.recvmsg_into(buffers)[0] if len(buffers) > 1 else sock.recv_into(buffers[0])
            except (BlockingIOError, InterruptedError):
                return
            self._arrived(count)
            if count < room:
                return
            budget -= count

    def _read_tls(self, sock: socket.socket, budget: int) -> None:
        connection = self.connection
        drained = False
        while (budget > 0 or sock.pending()) and not drained and not connection.finishing:  # type: ignore[attr-defined]
            view = connection.buffers()[0]
            room, position = len(view), 0
            try:
                while position < room:
                    count = sock.recv_into(view[position:])
                    position += count
                    if not count or position < _RECORD_BYTES:  # small messages are looked at as they come
                        break
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                drained = True
                if not position:
                    return
            self._arrived(position)
            budget -= position
            if position < _RECORD_BYTES and not sock.pending():  # type: ignore[attr-defined]
                return  # most likely all there is; if not, poll() says so

    def _arrived(self, count: int) -> None:
        if not count:
            raise PeerLostError("the other side closed the connection without a goodbye: its process ended or was killed")
        self.connection.filled(count)

    def _write_plain(self, sock: socket.socket) -> bool:
        """Sends what there is, up to a turn's worth; True if the socket takes no more now."""
        budget = _TURN_BYTES
        offered = min(_SEND_BYTES, 2 * self._unsent_bytes)  # about what the kernel takes
        while budget > 0 and (parts := self._outlet.outgoing(offered)):
            try:
                count = sock.sendmsg(parts[:_BUFFERS])
            except (BlockingIOError, InterruptedError):
                return True
            self._outlet.sent(count)
            budget -= count
        return False

    def _write_tls(self, sock: socket.socket) -> bool:
        budget = _TURN_BYTES
        while budget > 0 and (self._joined is not None or self._outlet.waiting):
            if self._joined is None:
                self._joined = _record(self._outlet.outgoing(min(_SEND_BYTES, 2 * self._unsent_bytes)))
            rest = self._joined
            try:
                while len(rest):
                    rest = rest[sock.send(rest) :]
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                self._sent_tls(rest)
                self._outlet.commit(len(rest))
                return True
            budget -= len(self._joined)
            self._sent_tls(rest)
        return False

    def _sent_tls(self, rest: memoryview) -> None:
        assert self._joined is not None
        self._outlet.sent(len(self._joined) - len(rest))
        self._joined = rest if len(rest) else None


def _record(parts: list[memoryview]) -> memoryview:
    """The next bytes for TLS: a large buffer as it is, small ones joined with what follows into one record."""
    if len(parts[0]) >= _RECORD_BYTES or len(parts) == 1:
        return parts[0]
    joined = bytearray()
    for part in parts:
        joined += part[: _RECORD_BYTES - len(joined)]
        if len(joined) == _RECORD_BYTES:
            break
    return memoryview(joined)


def _failure(error: Exception) -> FabricError | OSError:
    """What ends the connection: the error itself where it is of a kind that may happen."""
    if isinstance(error, (FabricError, OSError)):
        return error
    return FabricError(f"an error in this process: {type(error).__name__}: {error}")


def _acknowledged(sock: socket.socket, now: float, connection: Connection) -> bool | None:
    """Whether the peer's kernel answered lately. Asked only when nothing else is heard, and only Linux tells."""
    silence = now - connection.detector.last_heard
    beat = connection.detector.rule.heartbeat_seconds
    if silence < 2 * beat or sys.platform != "linux" or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    milliseconds: int = struct.unpack_from("<I", info, _TCP_INFO_LAST_ACK)[0]
    return milliseconds / 1000 < 3 * max(beat, 0.3)
