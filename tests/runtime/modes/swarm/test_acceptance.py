"""A stage's state is stored only from the worker that was told to, over real sockets: whatever other members send."""

import asyncio
import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.control.coordinator import Coordinator
from atoll.control.membership import Member
from atoll.control.settings import Settings
from atoll.control.world import SwarmProcess
from atoll.errors import RefusedError
from atoll.events import AnyEvent, PeerRefused
from atoll.fabric.security import Authority, RunMember, serve
from atoll.runtime.modes.swarm.files import CheckpointFiles, CheckpointService, FileJournal, Key, StageSnapshot, state_digest
from atoll.runtime.modes.swarm.transport import LoopClock

GOOD, WRONG = torch.full((64,), 1, dtype=torch.uint8), torch.full((64,), 2, dtype=torch.uint8)


class Stored:
    """A coordinator that has told `anna` to store stage 0 after step 5 of epoch 0, and `berta` stage 1."""

    def __init__(self, path: Path) -> None:
        self.events: list[AnyEvent] = []
        self.files = CheckpointFiles(path / "states")
        clock = LoopClock(lambda error: None)
        node = SwarmProcess("coordinator", clock, None, clock.mailbox(), 0, random.Random(0), self.events.append)  # type: ignore[arg-type]
        settings = Settings(stages=2, micro_batches=1, steps=9, state_quota=(64, 64))
        self.coordinator = Coordinator(node, FileJournal(path / "journal"), settings)
        told = [Member("anna", True, 1, 1, 0, 0.0), Member("berta", True, 2, 1, 1, 0.0), Member("carla", True, 3, 1, 0, 0.0)]
        self.coordinator.checkpoints.round.begin(5, told, 0.0)


@contextmanager
def running(path: Path) -> Iterator[tuple[Stored, Any]]:
    """The store behind a real fabric; and a function by which a member sends it a state."""
    authority = Authority.create(path)
    loop = asyncio.new_event_loop()
    stored: Future[Stored] = Future()

    async def start() -> None:
        stored.set_result(Stored(path))

    def serve_loop() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(start())
        loop.run_forever()

    thread = threading.Thread(target=serve_loop)
    thread.start()
    found = stored.result()
    service = CheckpointService(found.files, path / "checkpoints", loop, lambda: found.coordinator, lambda message: None)
    hub, address = serve(authority, "127.0.0.1:0", services=[service])
    members: dict[str, RunMember] = {}

    def send(name: str, key: Key, content: torch.Tensor) -> None:
        member = members.setdefault(name, RunMember(authority.credentials(name, "worker")))
        remote = member.fabric.peers.get("coordinator") or member.join(address)
        remote.call_soon(CheckpointService.write, StageSnapshot(key, content)).result(30)

    try:
        yield found, send
    finally:
        for member in members.values():
            member.close()
        hub.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_only_the_worker_that_was_told_stores_and_once(tmp_path: Path) -> None:
    with running(tmp_path) as (stored, send):
        for name, key in (
            ("mallory", Key(0, 5, 0)),
            ("carla", Key(0, 5, 0)),  # of the same stage, but not told
            ("anna", Key(0, 5, 1)),
            ("anna", Key(0, 4, 0)),
            ("anna", Key(0, 6, 0)),
            ("anna", Key(1, 5, 0)),
            ("anna", Key(0, 5, 7)),
            ("anna", Key(0, 5, -1)),
            ("anna", Key(0, -1, 0)),
        ):
            with pytest.raises(RefusedError, match="is not stored"):
                send(name, key, WRONG)
        with pytest.raises(RefusedError, match="65 bytes, and a state of this stage at most 64"):
            send("anna", Key(0, 5, 0), torch.zeros(65, dtype=torch.uint8))
        refused = [event for event in stored.events if isinstance(event, PeerRefused) and event.what == "state"]
        assert [event.peer for event in refused] == ["mallory", "carla", *["anna"] * 8]
        assert not list((tmp_path / "states").iterdir())
        send("anna", Key(0, 5, 0), GOOD)
        send("anna", Key(0, 5, 0), WRONG)  # the first stays
        found = asyncio.run(stored.files.read(Key(0, 5, 0)))
        assert found is not None
        assert torch.equal(found, GOOD)


def test_the_coordinator_hears_the_digest_of_what_is_stored_not_what_a_worker_says(tmp_path: Path) -> None:
    with running(tmp_path) as (stored, send):
        send("anna", Key(0, 5, 0), WRONG)
        inbox = stored.coordinator.node.inbox
        heard = asyncio.run(_take(inbox))
        assert (heard.epoch, heard.version, heard.stage, heard.digest) == (0, 5, 0, state_digest(WRONG))


async def _take(inbox: Any) -> Any:
    return await inbox.take()
