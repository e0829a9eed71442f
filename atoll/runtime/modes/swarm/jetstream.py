"""JetStream: a swarm's journal, checkpoints and leadership on NATS, so that no machine of the run is the only one that knows.

Needs `pip install atoll[nats]` and a `nats-server` with JetStream. One stream is the journal: every append names the sequence number it
expects to follow, so that of two coordinators only one can write. Leadership is a key that expires: who holds it coordinates, who does
not stands by. The key only saves quarrels; what keeps the journal right is the fence.
"""

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

import msgspec
import torch
from torch import Tensor

from atoll.control.journal import Record, Term, admit, encode, read_records
from atoll.errors import AtollError
from atoll.runtime.modes.swarm.files import Key, state_digest

if TYPE_CHECKING:
    from nats.js import JetStreamContext
    from nats.js.kv import KeyValue
    from nats.js.object_store import ObjectStore

__all__ = ["JetStream", "JetStreamCheckpoints", "JetStreamJournal", "Leadership", "connect_jetstream"]

LEASE_SECONDS = 5.0
_KEY = "leader"
_OVER = "over"
_WRONG_SEQUENCE = 10071  # the server's code for "somebody wrote in between"
_AGAIN_SECONDS = 0.5
_ANSWER_SECONDS = 2.0
_CONNECT_SECONDS = 5.0
_EXPECTED, _IDENTITY = "Nats-Expected-Last-Sequence", "Nats-Msg-Id"

Answer = TypeVar("Answer")


class JetStream(msgspec.Struct, frozen=True):
    """What a run keeps on NATS."""

    journal: "JetStreamJournal"
    checkpoints: "JetStreamCheckpoints"
    leadership: "Leadership"


@asynccontextmanager
async def connect_jetstream(servers: str, run: str, holder: str, *, lease_seconds: float = LEASE_SECONDS) -> AsyncIterator[JetStream]:
    """Opens what a run keeps, making it where it is not there yet. `holder` says who leads, for people."""
    try:
        import nats
        from nats.errors import Error
        from nats.js.api import KeyValueConfig, ObjectStoreConfig
    except ModuleNotFoundError:
        raise AtollError("NATS: nats-py is not installed; `pip install atoll[nats]` has it") from None
    name = "atoll-" + re.sub(r"[^A-Za-z0-9_-]", "-", run)
    try:
        connecting = nats.connect(servers.split(","), max_reconnect_attempts=-1, reconnect_time_wait=_AGAIN_SECONDS, error_cb=_quiet)
        client = await asyncio.wait_for(connecting, _CONNECT_SECONDS)
    except (Error, OSError, TimeoutError) as error:
        raise AtollError(f"NATS: {servers}: {str(error) or 'nobody answers'}; is `nats-server -js` running there?") from None
    try:
        stream = client.jetstream()
        try:
            await stream.add_stream(name=name, subjects=[f"{name}.journal"], allow_direct=True)
            keys = await stream.create_key_value(config=KeyValueConfig(bucket=name, ttl=lease_seconds))
            objects = await stream.create_object_store(name, config=ObjectStoreConfig())
        except Error as error:
            raise AtollError(f"NATS: {servers}: {error or type(error).__name__}; it must be started with JetStream (`-js`)") from None
        yield JetStream(JetStreamJournal(stream, name), JetStreamCheckpoints(objects), Leadership(keys, holder, lease_seconds))
    finally:
        await client.close()


async def _quiet(error: Exception) -> None:
    """Lost connections are made again; whoever asks meanwhile waits."""


async def _until_answered(ask: Callable[[], Awaitable[Answer]]) -> Answer:
    """Asks until the server answers: while it is away the run stands still."""
    from nats.errors import ConnectionClosedError, Error, NoRespondersError
    from nats.errors import TimeoutError as NatsTimeoutError
    from nats.js.errors import NoStreamResponseError, ServiceUnavailableError

    while True:
        try:
            return await ask()
        except ConnectionClosedError as error:
            raise AtollError("NATS: the connection was closed") from error
        except (NatsTimeoutError, NoRespondersError, NoStreamResponseError, ServiceUnavailableError):
            await asyncio.sleep(_AGAIN_SECONDS)
        except Error as error:
            if "outbound buffer" not in str(error):
                raise
            await asyncio.sleep(_AGAIN_SECONDS)


async def _found(ask: Callable[[], Awaitable[Answer]]) -> Answer | None:
    """What the server has; None where it has nothing whole of that name."""
    from nats.js.errors import DigestMismatchError, NotFoundError

    try:
        return await _until_answered(ask)
    except (NotFoundError, DigestMismatchError):
        return None


class JetStreamJournal:
    """The journal as a stream; a message is a line as in the file."""

    def __init__(self, stream: "JetStreamContext", name: str) -> None:
        self._stream, self._name = stream, name
        self._records: list[Record] = []  # that are known to be durable, oldest first; the sequence number of the last is their count
        self._newest_term = 0
        self._turn = asyncio.Lock()  # a record that is read while the answer to its append is on its way would be counted twice

    async def read(self) -> Sequence[Record]:
        """All durable records, oldest first."""
        async with self._turn:
            await self._catch_up()
            return list(self._records)

    async def append(self, term: int, record: Record) -> None:
        """Comes back when the record is durable; FencedError when another coordinator has taken over."""
        identity = secrets.token_hex(16)
        async with self._turn:
            admit(self._newest_term, term, record)
            while not await self._publish(record, identity):
                admit(self._newest_term, term, record)

    async def _publish(self, record: Record, identity: str) -> bool:
        """Whether the record is stored now. The identity tells, when the answer was lost, whether it was."""
        from nats.errors import ConnectionClosedError, Error
        from nats.js.errors import APIError

        expected = len(self._records)
        headers = {_EXPECTED: str(expected), _IDENTITY: identity}
        try:
            answer = await self._stream.publish(f"{self._name}.journal", encode(record), headers=headers, timeout=_ANSWER_SECONDS)
        except ConnectionClosedError as error:
            raise AtollError("NATS: the connection was closed") from error
        except Error as error:
            if not isinstance(error, APIError) or error.err_code != _WRONG_SEQUENCE:
                await asyncio.sleep(_AGAIN_SECONDS)
        else:
            if answer.seq == expected + 1 and not answer.duplicate:
                self._note(record)
                return True
        return identity in await self._catch_up()

    def _note(self, record: Record) -> None:
        self._records.append(record)
        if isinstance(record, Term):
            self._newest_term = max(self._newest_term, record.term)

    async def _catch_up(self) -> set[str]:
        """Reads what was appended since; the identities of it."""
        last = (await _until_answered(lambda: self._stream.stream_info(self._name))).state.last_seq
        if last < len(self._records):
            raise AtollError(f"NATS: stream {self._name} has {last} records of a journal that had {len(self._records)}; who removed them?")
        identities = set()
        while len(self._records) < last:
            message = await _until_answered(lambda: self._stream.get_msg(self._name, len(self._records) + 1, direct=True))
            records, _ = read_records(message.data or b"")
            if len(records) != 1:
                where = f"message {len(self._records) + 1} of stream {self._name}"
                raise AtollError(f"NATS: {where} is no record of a journal: the stream was written by others")
            self._note(records[0])
            identities.add((message.headers or {}).get(_IDENTITY, ""))
        return identities


class JetStreamCheckpoints:
    """Stages' states as objects; the store checks their digests."""

    def __init__(self, objects: "ObjectStore") -> None:
        self._objects = objects
        self._written: dict[Key, int] = {}  # bytes, of what was stored through this object

    async def write(self, key: Key, content: Tensor) -> str | None:
        """Comes back when durable; a second write of the same key changes nothing. The digest of what the key has, if it is whole."""
        if await self.exists(key):
            before = await self.read(key)
            return None if before is None else await asyncio.to_thread(state_digest, before)
        data = content.contiguous().numpy().tobytes()
        await _until_answered(lambda: self._objects.put(_object(key), data))
        self._written[key] = len(data)
        return await asyncio.to_thread(state_digest, content)

    async def read(self, key: Key) -> Tensor | None:
        """The state, or None where nothing whole is stored."""
        found = await _found(lambda: self._objects.get(_object(key)))
        return None if found is None else torch.frombuffer(bytearray(found.data or b""), dtype=torch.uint8)

    async def exists(self, key: Key) -> bool:
        """Whether it was stored."""
        return await _found(lambda: self._objects.get_info(_object(key))) is not None

    async def forget_before(self, version: int) -> None:
        """Removes states of steps before this one."""
        self._written = {key: size for key, size in self._written.items() if key.version >= version}
        for name in await self._names():
            if name != _OVER and int(name.split("-")[3]) < version:
                await _until_answered(lambda name=name: self._objects.delete(name))  # type: ignore[misc]

    async def discard(self, key: Key) -> None:
        """Removes one state, if it is there."""
        if await self.exists(key):
            await _until_answered(lambda: self._objects.delete(_object(key)))

    def stored_bytes(self, version: int) -> int:
        """What the states of a step weigh, of those stored through this object."""
        return sum(size for key, size in self._written.items() if key.version == version)

    async def _names(self) -> list[str]:
        found = await _found(lambda: self._objects.list(ignore_deletes=True))
        return [each.name for each in found or () if each.name]

    async def end(self, who: str) -> None:
        """The run is over, or was stopped; who coordinated has its weights."""
        await _until_answered(lambda: self._objects.put(_OVER, who.encode()))

    async def reopen(self) -> None:
        """A run that ended is started again."""
        if await self.ended() is not None:
            await _until_answered(lambda: self._objects.delete(_OVER))

    async def ended(self) -> str | None:
        """Who has the weights of a run that is over."""
        found = await _found(lambda: self._objects.get(_OVER))
        return None if found is None else (found.data or b"").decode()


def _object(key: Key) -> str:
    return f"epoch-{key.epoch}-step-{key.version}-stage-{key.stage}"


class Leadership:
    """A key that expires unless it is renewed."""

    def __init__(self, keys: "KeyValue", holder: str, lease_seconds: float) -> None:
        self._keys, self._holder, self._lease = keys, holder.encode(), lease_seconds
        self._revision = 0

    async def holder(self) -> str | None:
        """Who leads now."""
        found = await _found(lambda: self._keys.get(_KEY))
        return None if found is None else (found.value or b"").decode()

    async def take(self) -> bool:
        """Tries to become the one who leads."""
        from nats.js.errors import APIError

        try:
            self._revision = await _until_answered(lambda: self._keys.create(_KEY, self._holder))
        except APIError:
            return False
        return True

    async def keep(self) -> None:
        """Renews until somebody else leads. A server that is away is waited for: meanwhile nobody can lead."""
        from nats.js.errors import APIError

        while True:
            await asyncio.sleep(self._lease / 3)
            try:
                self._revision = await _until_answered(lambda: self._keys.update(_KEY, self._holder, last=self._revision))
            except APIError:
                if not await self.take():
                    return

    async def release(self) -> None:
        """Lets another lead at once."""
        await _until_answered(lambda: self._keys.delete(_KEY))
