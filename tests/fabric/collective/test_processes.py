"""Members in processes of their own, killed and stopped in the middle of a round: the others end, and know what they have."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest
import torch

from atoll.fabric import ConnectionSettings, Fabric, LivenessRule, ShapedLink, TcpCarrier
from atoll.fabric.collective import Collective, FixedCodecs, ReductionResult, RoundMember, RoundPlan, equal_network, make_plan
from tests.fabric.collective.peers import eventually

ELEMENTS = 1_000_000
CHILD = """
import sys, time
import msgspec, torch
from atoll.fabric import ConnectionSettings, Fabric, LivenessRule, ShapedLink, TcpCarrier
from atoll.fabric.collective import Collective, FixedCodecs, RoundPlan
torch.set_num_threads(1)
name, address, plan = sys.argv[1], sys.argv[2], msgspec.json.decode(sys.argv[3], type=RoundPlan)
collective = Collective(name, codecs=FixedCodecs("none"), threads=1)
settings = ConnectionSettings(name=name, liveness=LivenessRule(heartbeat_seconds=0.2, silent_beats=25, late_beats=10))
fabric = Fabric(name, services=[collective.service], settings=settings, carrier=TcpCarrier(link=ShapedLink(2e6, 0.005)))
collective.attach(fabric)
fabric.listen(address)
for other in sys.argv[4:]:
    fabric.run(fabric.connect(other).connected(60))
print("ready", flush=True)
sys.stdin.readline()
collective.reduce_soon(plan, torch.full((plan.elements,), float(ord(name)))).result()
print("done", flush=True)
time.sleep(1000)
"""


class Members:
    """Three members: `a` and `b` in this process, `z` in one of its own, over slow links so that a round takes a second."""

    def __init__(self) -> None:
        self.plan = plan_of(("a", "b", "z"))
        self.fabrics: dict[str, Fabric] = {}
        self.collectives: dict[str, Collective] = {}
        addresses: list[str] = []
        for name in "ab":
            collective = Collective(name, codecs=FixedCodecs("none"), threads=1)
            settings = ConnectionSettings(name=name, liveness=LivenessRule(heartbeat_seconds=0.2, silent_beats=25, late_beats=10))
            carrier = TcpCarrier(link=ShapedLink(2e6, 0.005))
            fabric = self.fabrics[name] = Fabric(name, services=[collective.service], settings=settings, carrier=carrier)
            self.collectives[name] = collective
            collective.attach(fabric)
            for address in addresses:
                fabric.run(fabric.connect(address).connected(60))
            addresses.append(fabric.listen())
        command = [sys.executable, "-c", CHILD, "z", "127.0.0.1:0", msgspec.json.encode(self.plan).decode(), *addresses]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.child.stdout is not None
        assert self.child.stdout.readline() == b"ready\n"
        eventually(lambda: all("z" in fabric.peers for fabric in self.fabrics.values()))

    def reduce(self, signal_number: int | None) -> dict[str, ReductionResult]:
        """A round; the child gets a signal once it has sent something."""
        assert self.child.stdin is not None
        self.child.stdin.write(b"go\n")
        self.child.stdin.flush()
        futures = {
            name: collective.reduce_soon(self.plan, torch.full((ELEMENTS,), float(ord(name))))
            for name, collective in self.collectives.items()
        }
        if signal_number is not None:
            eventually(lambda: any(collective.down.bytes_seen > 200_000 for collective in self.collectives.values()))
            os.kill(self.child.pid, signal_number)
        return {name: future.result(120) for name, future in futures.items()}

    def close(self) -> None:
        self.child.kill()
        self.child.communicate()
        for fabric in self.fabrics.values():
            fabric.close()
        for collective in self.collectives.values():
            collective.close()


def plan_of(names: tuple[str, ...]) -> RoundPlan:
    members = [RoundMember(name=name) for name in names]
    plan = make_plan("r", ELEMENTS, members, equal_network(names, 2e6), missing="leave out", chunk_elements=16_384)
    return msgspec.structs.replace(plan, stall_seconds=10.0, begin_seconds=60.0)


@pytest.fixture
def members() -> Iterator[Members]:
    found = Members()
    yield found
    found.close()


def check(results: dict[str, ReductionResult], plan: RoundPlan) -> None:
    """Every part is the sum it says; where both have a part it is the same."""
    for result in results.values():
        for part in result.parts:
            expected = float(sum(map(ord, part.contributors)))
            assert bool((result.value[part.start : part.stop] == expected).all())
    mine, yours = ({(part.start, part.digest) for part in results[name].parts if part.contributors} for name in "ab")
    starts = {start for start, _ in mine} & {start for start, _ in yours}
    assert {one for one in mine if one[0] in starts} == {one for one in yours if one[0] in starts}


def test_three_processes_reduce(members: Members) -> None:
    results = members.reduce(None)
    check(results, members.plan)
    assert results["a"].complete
    assert results["a"].digest == results["b"].digest


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_member_lost_in_the_middle_is_named_and_nobody_hangs(members: Members, number: int) -> None:
    results = members.reduce(number)
    check(results, members.plan)
    for result in results.values():
        assert not result.complete
        assert result.blamed == ("z",)
        assert all(set(part.contributors) >= {"a", "b"} for part in result.parts if part.owner != "z")
        assert all(part.blamed == ("z",) for part in result.missing)
