"""A real lab on this machine: names, ways, faults, and that nothing is left of it, however it ends. Needs network namespaces."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.cluster import dump_cluster
from atoll.errors import LabError
from atoll.events import AnyEvent
from atoll.lab import Lab, LabProcess, parse_fault
from atoll.lab.world import why_no_namespaces
from tests.lab.clusters import two_sites
from tests.lab.traces import eventually, left_of, namespaces, outside

WHY_NOT = why_no_namespaces()
pytestmark = [pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)), pytest.mark.timeout(240)]

CLUSTER = two_sites()
STATION = str(Path(__file__).with_name("station.py"))
OWNER = """
import sys
from atoll.lab import Lab
from tests.lab.clusters import two_sites
lab = Lab(two_sites(hosts=1))
lab.start("rome-0", ["setsid", "sleep", "1000"])
print(lab.name, flush=True)
sys.stdin.read()
"""


class Station:
    """`station.py` on a host."""

    numbers = itertools.count()

    def __init__(self, lab: Lab, host: str) -> None:
        self.lab, self.host = lab, host
        self.process: LabProcess = lab.start(
            host, [sys.executable, STATION, lab.address(host)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._line() == "ready"

    def say(self, host: str, text: str) -> None:
        assert self._ask(f"say {self.lab.address(host)} {text}") == "said"

    def hears(self, seconds: float = 30.0) -> str:
        return self._ask(f"hear {seconds}")

    def reaches(self, other: "Station", patience_seconds: float = 0.5) -> bool:
        """Sends once; what was sent before and comes late does not count."""
        wanted = f"from-{self.host}-{next(self.numbers)}"
        self.say(other.host, wanted)
        while (heard := other.hears(patience_seconds)) not in ("nothing", wanted):
            pass
        return heard == wanted

    def _ask(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()
        return self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    before, events = outside(), []
    with Lab(CLUSTER, observer=events.append) as lab:
        lab.events = events  # type: ignore[attr-defined]
        yield lab
    assert outside() == before
    assert left_of(lab.name) == []


@pytest.fixture(scope="module")
def stations(lab: Lab) -> Iterator[dict[str, Station]]:
    stations = {host: Station(lab, host) for host in lab.hosts}
    yield stations
    for station in stations.values():
        station.process.kill()
        station.process.communicate()


def test_a_host_has_its_name_its_address_and_the_others_names(lab: Lab) -> None:
    said = lab.run("rome-1", ["sh", "-c", "hostname; cat /etc/hosts; echo $ATOLL_LAB_HOST; ip -br addr show eth0"])
    name, *hosts = said.splitlines()
    assert name == "rome-1"
    assert [f"{lab.address(host)} {host}" in hosts for host in lab.hosts] == [True] * 4
    assert lab.address("rome-1") in hosts[-1]


def test_hosts_reach_each_other_inside_and_between_sites(stations: dict[str, Station]) -> None:
    for a, b in (("oslo-0", "oslo-1"), ("oslo-0", "rome-0"), ("rome-1", "oslo-1")):
        assert stations[a].reaches(stations[b], 30.0)


@pytest.mark.parametrize("pair", [("oslo-0", "oslo-1"), ("oslo-0", "rome-0")], ids=["inside a site", "between sites"])
def test_a_cut_in_one_direction_leaves_the_other(lab: Lab, stations: dict[str, Station], pair: tuple[str, str]) -> None:
    a, b = stations[pair[0]], stations[pair[1]]
    lab.cut_one_way(*pair)
    assert not a.reaches(b)
    assert b.reaches(a, 30.0)
    lab.restore(pair)
    assert a.reaches(b, 30.0)


@pytest.mark.parametrize("place", ["rome-0", "rome", ("oslo-0", "rome-0"), ("oslo", "rome")], ids=str)
def test_what_is_cut_is_cut_until_it_is_restored(lab: Lab, stations: dict[str, Station], place: str | tuple[str, str]) -> None:
    lab.cut(place)
    assert not stations["oslo-0"].reaches(stations["rome-0"])
    assert not stations["rome-0"].reaches(stations["oslo-0"])
    assert stations["rome-1"].reaches(stations["rome-0"], 0.5 if place == "rome-0" else 30.0) == (place != "rome-0")
    lab.restore(place)
    eventually(lambda: stations["oslo-0"].reaches(stations["rome-0"]))


@pytest.mark.parametrize("place", ["oslo-1", ("oslo", "rome")], ids=str)
def test_all_packets_can_be_lost_and_none_after(lab: Lab, stations: dict[str, Station], place: str | tuple[str, str]) -> None:
    lab.loss(place, 1.0)
    assert not stations["oslo-1"].reaches(stations["rome-1"])
    assert stations["oslo-0"].reaches(stations["oslo-1"], 0.5 if place == "oslo-1" else 30.0) == (place != "oslo-1")
    lab.restore()
    eventually(lambda: stations["oslo-1"].reaches(stations["rome-1"]))


def test_slow_interfaces_and_links_are_what_was_asked(lab: Lab) -> None:
    lab.slow("oslo-0", 10)
    lab.slow(("rome", "oslo"), 4)
    assert "rate 100Mbit" in lab.run("oslo-0", ["tc", "qdisc", "show", "dev", "eth0"])
    lab.restore()
    assert "rate 1Gbit" in lab.run("oslo-0", ["tc", "qdisc", "show", "dev", "eth0"])
    assert lab.in_force.in_force == ()


def test_a_stopped_host_answers_again_when_it_goes_on(lab: Lab, stations: dict[str, Station]) -> None:
    lab.start("oslo-1", ["sleep", "1000"])
    eventually(lambda: len(lab.world.processes("oslo-1")) >= 2)
    lab.stop("oslo-1")
    pids = lab.world.processes("oslo-1")
    eventually(lambda: all(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T" for pid in pids))
    lab.go_on("oslo-1")
    assert stations["oslo-1"].reaches(stations["oslo-0"], 30.0)


def test_killing_a_host_ends_all_of_it_and_it_boots_again(lab: Lab) -> None:
    booted: list[str] = []
    lab.booted = booted.append
    process = lab.start("rome-1", ["sh", "-c", "setsid sleep 1000 & setsid sleep 1000 & wait"])
    eventually(lambda: len(lab.world.processes("rome-1")) >= 3)
    pids = lab.world.processes("rome-1")
    lab.kill("rome-1")
    assert process.wait(30) == -signal.SIGKILL
    assert process.host_killed
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with pytest.raises(LabError, match="rome-1 is dead"):
        lab.start("rome-1", ["true"])
    lab.restore("rome-1")
    assert booted == ["rome-1"]
    for _ in range(4):  # whichever of the two processes that make a host is the first to speak
        lab.kill("rome-1")
        lab.restore("rome-1")
    assert lab.run("rome-1", ["hostname"]) == "rome-1\n"
    lab.booted = None


def test_processes_on_other_hosts_can_be_asked_for_from_inside(lab: Lab) -> None:
    command = [sys.executable, "-m", "atoll.lab.on_host", "rome-0", "sh", "-c", "hostname; echo $MINE; exit 7"]
    process = lab.start("oslo-0", command, environ={"MINE": "taken along"}, stdout=subprocess.PIPE)
    assert process.communicate(60)[0].decode() == "rome-0\ntaken along\n"
    assert process.returncode == 7


def test_if_whoever_asked_is_killed_so_is_the_process(lab: Lab) -> None:
    before = set(lab.world.processes("rome-0"))
    process = lab.start("oslo-0", [sys.executable, "-m", "atoll.lab.on_host", "rome-0", "sleep", "1000"])
    eventually(lambda: set(lab.world.processes("rome-0")) - before)
    process.kill()
    eventually(lambda: set(lab.world.processes("rome-0")) <= before)


def test_a_process_that_is_forked_on_one_host_lives_and_dies_on_another(lab: Lab) -> None:
    before = set(lab.world.processes("rome-0"))
    forking = str(Path(__file__).with_name("forking.py"))
    process = lab.start("oslo-0", [sys.executable, forking, "rome-0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"on rome-0 as rome-0\n"
    (there,) = set(lab.world.processes("rome-0")) - before
    here = set(lab.world.processes("oslo-0"))
    assert there not in here
    lab.kill("rome-0")
    said, complaints = process.communicate(120)
    assert said == b"signal 9\nexit code 1\n", "what is dead starts nothing"
    assert b"rome-0 is dead; restore it first" in complaints
    assert not Path(f"/proc/{there}").exists()
    lab.restore("rome-0")


def test_every_fault_is_an_event_and_ends_when_its_time_is_over(lab: Lab) -> None:
    events: list[AnyEvent] = lab.events  # type: ignore[attr-defined]
    events.clear()
    lab.play([parse_fault("0s slow oslo rome 3 for 0.01s", CLUSTER), parse_fault("0s cut rome-1 for 0.01s", CLUSTER)])
    eventually(lambda: len(events) == 4)
    assert sorted((event.kind, event.fault) for event in events) == [  # type: ignore[union-attr]
        ("fault_ended", "cut"),
        ("fault_ended", "slow"),
        ("fault_injected", "cut"),
        ("fault_injected", "slow"),
    ]
    assert lab.in_force.in_force == ()


def test_what_cannot_be_is_refused(lab: Lab) -> None:
    with pytest.raises(LabError, match="no host 'paris'"):
        lab.start("paris", ["true"])
    with pytest.raises(LabError, match="no host or site"):
        lab.cut("paris")
    with pytest.raises(LabError, match=r"ended with 127.*cannot start"):
        lab.run("oslo-0", ["no-such-program"])


def test_nothing_is_left_when_the_labs_own_process_dies() -> None:
    before = outside()
    command = [sys.executable, "-c", OWNER]
    owners = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for _ in range(3)]
    for owner, number in zip(owners, (signal.SIGKILL, signal.SIGTERM, signal.SIGINT), strict=True):
        with owner:
            assert owner.stdout is not None
            name = owner.stdout.readline().decode().strip()
            spaces = namespaces([int(line.split()[0]) for line in left_of(name)]) - namespaces([os.getpid()])
            assert len(spaces) >= 2
            owner.send_signal(number)
            owner.wait(60)
        eventually(lambda name=name: left_of(name) == [])
        eventually(lambda spaces=spaces: not spaces & _all_namespaces())
    assert outside() == before


def _all_namespaces() -> set[str]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        with contextlib.suppress(OSError):
            found.add(str(path.readlink()))
    return found


def test_two_labs_are_strangers_and_the_command_ends_as_its_command(tmp_path: Path, lab: Lab) -> None:
    (tmp_path / "c.toml").write_text(dump_cluster(two_sites(hosts=1)))
    (tmp_path / "faults.toml").write_text('[[fault]]\nat = "0s"\nkind = "slow"\nbetween = ["oslo", "rome"]\nfactor = 2\n')
    script = "echo I am $(hostname) of $ATOLL_LAB; test $(hostname) = oslo-0 || exit 3"
    command = [
        sys.executable,
        "-c",
        "from atoll.cli import main; main()",
        "lab",
        str(tmp_path / "c.toml"),
        "--all",
        "--faults",
        str(tmp_path / "faults.toml"),
    ]
    other = subprocess.run([*command, "--", "sh", "-c", script], capture_output=True, text=True, timeout=120)
    assert other.returncode == 3, other.stderr
    lines = sorted(other.stdout.splitlines())
    assert [line.partition(" of ")[0] for line in lines] == ["[oslo-0] I am oslo-0", "[rome-0] I am rome-0"]
    assert lab.name not in other.stdout
    assert "slow oslo rome 2" in other.stderr
