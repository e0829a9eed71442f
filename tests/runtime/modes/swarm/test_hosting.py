"""Processes that host several stages: who may speak for their workers, how they are reached, and that they train the same."""

import asyncio
import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from atoll.control.messages import Backward, FeederBeat, Message, WorkerBeat
from atoll.control.settings import Settings
from atoll.errors import AtollError, RefusedError
from atoll.events import AnyEvent, CodecChosen, StateFetched, StepFinished, Warned
from atoll.fabric.security import Authority, RunMember, serve
from atoll.fabric.service import CallingPeer
from atoll.runtime.modes.swarm.measurement import Account, MeasureService
from atoll.runtime.modes.swarm.member_process import check_hosted
from atoll.runtime.modes.swarm.report import Measured, read_members
from atoll.runtime.modes.swarm.spec import SwarmSpec
from atoll.runtime.modes.swarm.transport import Directory, FabricTransport, Inboxes, LoopClock, PeerAddress, SwarmService, check_sender
from atoll.runtime.run_directory import RunDirectory

from .one_process import OneProcess
from .test_compression import ATTEMPT
from .test_compute import check, job, plain

SETTINGS = Settings(stages=8, micro_batches=8, steps=1)


def beat(worker: str) -> WorkerBeat:
    return WorkerBeat(worker, 0, 1, -1, -1, -1, 0, 0, -1, 0.0, None, "", None)


def test_a_member_speaks_for_its_own_workers_and_for_nobody_elses() -> None:
    for name in ("oslo", "oslo+1", "oslo+12"):
        check_sender(beat(name), "oslo", "worker")
    for name in ("rome", "rome+1", "oslo+", "oslo+0", "oslo+x", "oslo+1+1", "oslo-1", "osl", "+1"):
        with pytest.raises(RefusedError, match="in the name of"):
            check_sender(beat(name), "oslo", "worker")
    with pytest.raises(RefusedError):
        check_sender(FeederBeat("oslo+1", 0, 1, 0, 0, None, 0, 0), "oslo", "feeder")


def test_over_sockets_a_hosted_worker_is_reached_in_its_process_and_cannot_be_impersonated(tmp_path: Path) -> None:
    arrived: list[tuple[str, Message]] = []
    there = threading.Event()

    def take(to: str, message: Message) -> None:
        arrived.append((to, message))
        there.set()

    authority = Authority.create(tmp_path)
    coordinator, _ = serve(authority, "127.0.0.1:0")
    places = Directory()
    receiver = RunMember(authority.credentials("rome", "worker"), services=[SwarmService(take, SETTINGS)])
    with coordinator, receiver, RunMember(authority.credentials("oslo", "worker")) as oslo:
        places._places["rome"] = PeerAddress(receiver.fabric.listen("127.0.0.1:0"))

        async def send() -> int:
            transport = FabricTransport(oslo, None, places)
            transport.send("rome+2", beat("rome+1"))  # as if it were of the receiver's own process
            while not transport.lost:
                await asyncio.sleep(0.01)
            transport.send("rome+2", beat("oslo+1"))
            assert await asyncio.to_thread(there.wait, 60)
            return transport.lost

        assert asyncio.run(send()) == 1
    assert arrived == [("rome+2", beat("oslo+1"))]


def test_between_workers_of_a_process_messages_are_handed_over_as_they_are() -> None:
    async def send() -> tuple[Message, Message]:
        clock = LoopClock(print)
        inside = Inboxes("oslo")
        first, second = inside.open("oslo", clock), inside.open("oslo+1", clock)
        transport = FabricTransport(cast(RunMember, None), None, inside=inside)  # without a fabric
        message = Backward(0, 1, 0, 2, ATTEMPT, [torch.ones(3)])
        transport.send("oslo", message)
        transport.send("oslo+1", message)
        transport.send("oslo+7", message)  # nobody: it is lost, and goes nowhere else
        return await first.take(), await second.take()

    first, second = asyncio.run(send())
    assert first is second
    assert isinstance(first, Backward)


def test_an_account_is_taken_of_ones_own_workers_only(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    service, oslo = MeasureService(directory), CallingPeer("oslo", "worker")
    asyncio.run(service.measured(Account("oslo+1", Measured()), oslo))
    with pytest.raises(RefusedError, match="an account of rome"):
        asyncio.run(service.measured(Account("rome", Measured()), oslo))
    service.write()
    assert list(read_members(directory)) == ["oslo+1"]


@pytest.mark.parametrize(("stages", "of", "said"), [(3, 2, "the run has 2 stages"), (2, 1, "the run has 1 stage"), (0, 2, "at least one")])
def test_more_stages_than_there_are_cannot_be_hosted(stages: int, of: int, said: str) -> None:
    settings = Settings(stages=of, micro_batches=1, steps=1)
    spec = SwarmSpec(script_name="", script="", arguments=(), bounds=(), micro_batches=(), settings=settings, fingerprint={})
    with pytest.raises(AtollError, match=said):
        check_hosted(stages, spec)


def trained(swarm: OneProcess, processes: dict[str, int], disturb: Any = lambda swarm, event: None) -> None:
    async def train() -> None:
        for name, stages in processes.items():
            swarm.add_process(name, stages)
        await swarm.run(disturb)

    asyncio.run(train())


@pytest.mark.parametrize("processes", [{"all": 3}, {"a": 2, "b": 2}, {"a": 3, "b": 1, "c": 3}])
def test_processes_that_host_several_stages_equal_plain_pytorch(processes: dict[str, int]) -> None:
    """Activations, gradients, parts and sums pass between workers of a process without being copied."""
    it = job(max_grad_norm=0.05)
    swarm = OneProcess(it, [0, 1, 3, 5], 0, 4, chunks=2, max_norm=0.05)
    trained(swarm, processes)
    check(swarm, plain(it))


def test_a_killed_process_and_one_that_joins_change_nothing() -> None:
    it = job()
    swarm = OneProcess(it, [0, 2, 5], 0, 3, chunks=3)

    def disturb(swarm: OneProcess, event: AnyEvent) -> None:
        if isinstance(event, StepFinished) and event.step == 2:
            asyncio.get_running_loop().create_task(swarm.kill_process("b"))
            swarm.add_process("c", 2)

    trained(swarm, {"a": 2, "b": 2}, disturb)
    check(swarm, plain(it))


def test_a_members_events_are_its_own_few_and_printable_and_links_are_counted_once(tmp_path: Path) -> None:
    heard: list[AnyEvent] = []
    service, oslo = MeasureService(RunDirectory(tmp_path), heard.append, "auto"), CallingPeer("oslo", "worker")
    told = (
        CodecChosen(link="rome", codec="int8", before="", reason="slow\x1b[2J"),
        StateFetched(name="rome", stage=0, step=3, size_bytes=5, seconds=1.0),
        StateFetched(name="oslo+1", stage=1, step=3, size_bytes=5, seconds=1.0),
        Warned(message="x" * 1000 + "\n", source="coordinator"),
        *[Warned(message="flood")] * 100,
    )
    asyncio.run(service.measured(Account("oslo", Measured(received_bytes={"rome": 100, "oslo": 7}), told), oslo))
    asyncio.run(service.measured(Account("oslo", Measured(received_bytes={"rome": 100}), told), oslo))  # too soon
    assert len(heard) == 64
    codec, first, second, warned = heard[:4]
    assert isinstance(codec, CodecChosen)
    assert (codec.link, codec.reason) == ("oslo → rome", "slow [2J")
    assert [event.name for event in (first, second) if isinstance(event, StateFetched)] == ["oslo", "oslo+1"]
    assert isinstance(warned, Warned)
    assert (warned.source, len(warned.message)) == ("oslo", 500)
    rome = CallingPeer("rome", "worker")
    sent = Measured(received_bytes={"oslo": 40}, received_bytes_per_s={"oslo": 10.0}, round_trip_seconds={"oslo": 0.1})
    asyncio.run(service.measured(Account("rome", sent), rome))
    links = service.links()
    assert links is not None
    assert [(link.source, link.target, link.bytes, link.seconds, link.codec) for link in links.links] == [
        ("rome", "oslo", 100, None, "none"),
        ("oslo", "rome", 40, 4.0, "int8"),
    ]
    assert service.links() is None
