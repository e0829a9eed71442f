"""The journal, the checkpoints and the leadership of a run on a real nats-server that is killed and started again."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from atoll.control.journal import Checkpointed, Epoch, FencedError, Record, Term
from atoll.errors import AtollError
from atoll.runtime.modes.swarm.files import Key
from atoll.runtime.modes.swarm.jetstream import JetStreamJournal, connect_jetstream

from .nats_server import NatsServer, nats_server, needs_nats

pytestmark = needs_nats


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with nats_server(tmp_path_factory.mktemp("nats")) as server:
        yield server


def test_a_journal_is_what_was_appended(server: NatsServer) -> None:
    records: list[tuple[int, Record]] = [(1, Term(1)), (1, Epoch(0, 0, 0)), (1, Checkpointed(0, 3)), (2, Term(2)), (2, Checkpointed(0, 4))]

    async def check() -> None:
        async with connect_jetstream(server.address, "a run/1", "one") as one, connect_jetstream(server.address, "a run/1", "two") as two:
            for term, record in records[:3]:
                await one.journal.append(term, record)
            for term, record in records[3:]:
                await two.journal.append(term, record)
            assert await one.journal.read() == await two.journal.read() == [record for _, record in records]
            with pytest.raises(FencedError, match="at term 2; a record of term 1 is refused"):
                await one.journal.append(1, Checkpointed(0, 5))
        async with connect_jetstream(server.address, "a run/2", "one") as other:
            assert await other.journal.read() == []

    asyncio.run(check())


def test_a_journal_that_is_read_while_it_is_appended_to_has_every_record_once(server: NatsServer) -> None:
    """Checkpoints are completed beside the steps that follow, and read the journal for their losses."""
    records: list[Record] = [Term(1), *(Checkpointed(0, step) for step in range(1, 100))]

    async def check() -> None:
        async with connect_jetstream(server.address, "read meanwhile", "one") as one:

            async def read_until_all_is_there() -> None:
                while len(found := await one.journal.read()) < len(records):
                    assert found == records[: len(found)]

            reading = [asyncio.ensure_future(read_until_all_is_there()) for _ in range(3)]
            for record in records:
                await asyncio.wait_for(one.journal.append(1, record), 20)
            await asyncio.gather(*reading)
            assert await one.journal.read() == records

    asyncio.run(check())


def test_a_journal_that_somebody_removed_under_a_run_ends_it_with_a_sentence(server: NatsServer) -> None:
    async def check() -> None:
        async with connect_jetstream(server.address, "removed", "one") as one:
            await one.journal.append(1, Term(1))
            await one.journal.append(1, Checkpointed(0, 1))
            await one.journal._stream.delete_stream("atoll-removed")
            async with connect_jetstream(server.address, "removed", "two"):
                with pytest.raises(AtollError, match="stream atoll-removed has 0 records of a journal that had 2"):
                    await asyncio.wait_for(one.journal.append(1, Checkpointed(0, 2)), 60)

    asyncio.run(check())


def test_of_coordinators_that_take_over_together_one_does(server: NatsServer) -> None:
    """Whoever writes late is refused, even where both write the same record."""

    async def check() -> None:
        async with connect_jetstream(server.address, "together", "one") as one, connect_jetstream(server.address, "together", "two") as two:
            for term in range(1, 11):
                outcomes = await asyncio.gather(
                    one.journal.append(term, Term(term)), two.journal.append(term, Term(term)), return_exceptions=True
                )
                assert sorted(type(outcome) for outcome in outcomes if outcome is not None) == [FencedError]
            assert await one.journal.read() == [Term(term) for term in range(1, 11)]

    asyncio.run(check())


def test_no_record_of_an_old_term_follows_a_newer_one(server: NatsServer) -> None:
    draw = random.Random(3)

    async def coordinator(journal: JetStreamJournal, number: int, durable: list[Record]) -> None:
        for _ in range(6):
            term = max((record.term for record in await journal.read() if isinstance(record, Term)), default=0) + 1
            try:
                await journal.append(term, Term(term))
                for step in range(draw.randrange(6)):
                    record = Checkpointed(term, 1000 * number + step)
                    await journal.append(term, record)
                    durable.append(record)
            except FencedError:
                continue

    async def check() -> None:
        durable: list[Record] = []
        async with (
            connect_jetstream(server.address, "many", "one") as one,
            connect_jetstream(server.address, "many", "two") as two,
            connect_jetstream(server.address, "many", "three") as three,
        ):
            await asyncio.gather(*(coordinator(each.journal, number, durable) for number, each in enumerate((one, two, three))))
            newest, seen = 0, []
            for record in await one.journal.read():
                if isinstance(record, Term):
                    assert record.term == newest + 1
                    newest = record.term
                else:
                    assert isinstance(record, Checkpointed)
                    assert record.epoch == newest
                    seen.append(record)
            assert sorted(seen, key=str) == sorted(durable, key=str), "what append came back from is there, once"

    asyncio.run(check())


def test_a_server_that_is_killed_is_waited_for_and_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    async def check(server: NatsServer) -> None:
        async with connect_jetstream(server.address, "run", "one") as one:
            await one.journal.append(1, Term(1))

            async def write() -> None:
                for step in range(200):
                    await one.journal.append(1, Checkpointed(0, step))

            writing = asyncio.create_task(write())
            for _ in range(2):
                before = len(one.journal._records)
                while len(one.journal._records) < before + 20:
                    await asyncio.sleep(0.001)
                server.kill()
                server.start()
            await writing
            assert await one.journal.read() == [Term(1), *(Checkpointed(0, step) for step in range(200))]

    with nats_server(tmp_path / "store") as server:
        asyncio.run(check(server))


def test_a_checkpoint_is_whole_or_not_there(server: NatsServer) -> None:
    async def check() -> None:
        async with connect_jetstream(server.address, "states", "one") as one:
            content = torch.arange(3_000_000).to(torch.uint8)
            assert await one.checkpoints.read(Key(0, 5, 1)) is None
            await one.checkpoints.write(Key(0, 5, 1), content)
            await one.checkpoints.write(Key(0, 5, 1), torch.zeros(3, dtype=torch.uint8))
            found = await one.checkpoints.read(Key(0, 5, 1))
            assert found is not None
            assert torch.equal(found, content)
            assert not await one.checkpoints.exists(Key(0, 5, 2))

    asyncio.run(check())


def test_old_states_are_removed_and_a_run_that_ended_can_be_opened_again(server: NatsServer) -> None:
    async def check() -> None:
        async with connect_jetstream(server.address, "old", "one") as one, connect_jetstream(server.address, "old", "two") as two:
            await one.checkpoints.forget_before(7)  # of nothing
            for version in (2, 10):
                for stage in (0, 1):
                    await one.checkpoints.write(Key(0, version, stage), torch.zeros(5, dtype=torch.uint8))
            assert (one.checkpoints.stored_bytes(2), one.checkpoints.stored_bytes(10)) == (10, 10)
            assert await two.checkpoints.ended() is None
            await one.checkpoints.end("h:1")
            await one.checkpoints.forget_before(10)
            assert [await two.checkpoints.exists(Key(0, version, 1)) for version in (2, 10)] == [False, True]
            assert await two.checkpoints.ended() == "h:1"
            await two.checkpoints.reopen()
            await two.checkpoints.reopen()
            assert await one.checkpoints.ended() is None

    asyncio.run(check())


def test_one_leads_until_it_dies_or_lets_go(server: NatsServer) -> None:
    async def check() -> None:
        async with (
            connect_jetstream(server.address, "lead", "one", lease_seconds=1.0) as one,
            connect_jetstream(server.address, "lead", "two", lease_seconds=1.0) as two,
        ):
            assert await one.leadership.take()
            assert not await two.leadership.take()
            keeping = asyncio.create_task(one.leadership.keep())
            await asyncio.sleep(2.5)  # longer than the lease
            assert await two.leadership.holder() == "one"
            keeping.cancel()  # it dies
            while not await two.leadership.take():
                await asyncio.sleep(0.05)
            await one.leadership.keep()  # comes back at once: another leads
            await two.leadership.release()
            assert await one.leadership.take()

    asyncio.run(check())


def test_a_server_that_is_not_there_is_said() -> None:
    async def check() -> None:
        async with connect_jetstream("nats://127.0.0.1:9", "run", "one"):
            pass

    with pytest.raises(AtollError, match=r"NATS: nats://127.0.0.1:9: .*is `nats-server -js` running there\?"):
        asyncio.run(check())
