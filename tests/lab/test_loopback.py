"""A lab without namespaces: hosts are loopback addresses, the fabric shapes what it sends, and what cannot be imposed is refused."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from atoll.errors import FabricError, LabError
from atoll.fabric import CallingPeer, Fabric, TcpCarrier
from atoll.fabric.security import Authority, RunMember, enrol, serve
from atoll.fabric.service import allowed
from atoll.fabric.shaped import LINKS, ImposedLink, ImposedLinks, LinkChoice, imposed_links
from atoll.lab import Lab, parse_fault
from atoll.lab.world import LAB_FILES, mark, remove_orphans, why_no_namespaces
from tests.lab.clusters import two_sites
from tests.lab.traces import eventually, left_of

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="Linux has many loopback addresses"), pytest.mark.timeout(240)]

OWNER = """
import sys
from atoll.lab import Lab
from tests.lab.clusters import two_sites
lab = Lab(two_sites(hosts=1), namespaces=False)
lab.start("rome-0", ["sleep", "1000"])
print(lab.name, lab.world.files, flush=True)
sys.stdin.read()
"""


class Echo:
    """Gives back what it gets."""

    async def echo(self, data: bytes, peer: CallingPeer) -> bytes:
        """The same."""
        return data


def test_processes_find_their_links_and_the_fabric_sends_through_them() -> None:
    with Lab(two_sites(), namespaces=False) as lab:
        environ = {host: lab.environment(host, {}) for host in lab.hosts}
        carriers = {host: TcpCarrier(link=imposed_links(environ[host])) for host in ("oslo-0", "rome-0")}
        with Fabric("rome", services=[Echo()], carrier=carriers["rome-0"]) as rome, Fabric("oslo", carrier=carriers["oslo-0"]) as oslo:
            remote = oslo.connect(rome.listen(f"{lab.address('rome-0')}:0"))
            assert remote.call_sync(Echo.echo, b"x" * 5000, timeout_seconds=60) == b"x" * 5000
        for host, other in (("oslo-0", "rome-0"), ("rome-0", "oslo-0")):
            link = carriers[host]._link
            assert isinstance(link, LinkChoice)
            shaped = link.link_to(lab.address(other))
            assert shaped is not None
            assert shaped.bytes_per_s == 25e6
            assert shaped._free_at > 0, "bytes passed it"
            neighbour = link.link_to(lab.address(host.replace("0", "1")))
            assert neighbour is not None
            assert neighbour._free_at == 0
    assert not lab.world.files.exists()


def test_members_of_a_run_send_through_the_links_that_are_imposed_on_them(tmp_path: Path) -> None:
    class Open(Echo):
        @allowed("worker")
        async def echo(self, data: bytes, peer: CallingPeer) -> bytes:
            """The same."""
            return data

    with Lab(two_sites(), namespaces=False) as lab:
        oslo, rome = (imposed_links(lab.environment(host, {})) for host in ("oslo-0", "rome-0"))
        assert oslo is not None
        assert rome is not None
        authority = Authority.create(tmp_path)
        coordinator, address = serve(authority, f"{oslo.source}:0", services=[Open()], links=oslo)
        with coordinator, RunMember(enrol(address, authority.issue_token(), "anna"), links=rome) as anna:
            assert anna.join(address).call_sync(Open.echo, b"x" * 5000, timeout_seconds=60) == b"x" * 5000
        for links, peer in ((oslo, rome), (rome, oslo)):
            shaped = links.link_to(peer.source)
            assert shaped is not None
            assert shaped._free_at > 0, "bytes passed it"


def test_peers_of_one_link_share_it_and_strangers_have_none() -> None:
    one, two = (ImposedLink("oslo–rome", 1e6, 0.1) for _ in range(2))
    choice = LinkChoice(ImposedLinks("127.1.0.2", {"127.2.0.2": one, "127.2.0.3": two}))
    assert choice.link_to("127.2.0.2") is choice.link_to("127.2.0.3")
    assert choice.link_to("127.0.0.1") is None
    assert (choice.source_for("127.2.0.2"), choice.source_for("127.0.0.1")) == (("127.1.0.2", 0), None)


def test_an_environment_without_links_imposes_none_and_a_bad_one_is_told(tmp_path: Path) -> None:
    assert imposed_links({}) is None
    (tmp_path / "links.json").write_text("{}")
    for path in ("links.json", "none.json"):
        with pytest.raises(FabricError, match="ATOLL_LINKS"):
            imposed_links({LINKS: str(tmp_path / path)})


def test_processes_can_be_killed_and_stopped_but_there_is_no_network_to_hurt() -> None:
    with Lab(two_sites(), namespaces=False) as lab:
        process = lab.start("rome-0", ["sh", "-c", "setsid sleep 1000 & sleep 1000"])
        eventually(lambda: len(lab.world.processes("rome-0")) >= 4)  # with the guard
        lab.kill("rome-0")
        assert process.wait(30) == -signal.SIGKILL
        assert lab.world.processes("rome-0") == []
        with pytest.raises(LabError, match=r"cut rome-0: faults of the network need network namespaces \(loopback was asked for\)"):
            lab.play([parse_fault("1s kill rome-1", lab.cluster), parse_fault("2s cut rome-0", lab.cluster)])
        with pytest.raises(LabError, match="need network namespaces"):
            lab.cut("rome-0")
        lab.restore()
        assert lab.run("rome-0", ["sh", "-c", "echo $ATOLL_LAB_HOST"]) == "rome-0\n"
        assert "fabric, and on nothing else" in lab.shaped
    assert left_of(lab.name) == []


def test_nothing_runs_on_when_the_labs_own_process_is_killed_and_its_files_go_with_the_next_lab() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with owner:
        assert owner.stdout is not None
        name, files = owner.stdout.readline().decode().split()
        owner.kill()
    eventually(lambda: left_of(name) == [])
    remove_orphans()
    assert not Path(files).exists()


def test_what_belongs_to_a_living_lab_or_another_pid_namespace_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    pid, started, space = mark(os.getpid()).split(".")
    marks = {"alive": f"{pid}.{started}.{space}", "reused": f"{pid}.1.{space}", "elsewhere": f"{pid}.1.1", "foreign": "x"}
    for name, owner in marks.items():
        (tmp_path / f"{LAB_FILES}{owner}-{name}").mkdir()
    assert [path for path in remove_orphans() if str(tmp_path) in path] == [f"{tmp_path}/{LAB_FILES}{marks['reused']}-reused"]
    assert len(list(tmp_path.iterdir())) == 3


def test_who_cannot_have_namespaces_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.lab.world._INSIDE", "/dev/null/no-such-program")
    why = why_no_namespaces()
    assert why is not None
    with Lab(two_sites()) as lab:
        assert (lab.namespaces, lab.why_not) == (False, why)


def test_links_survive_json() -> None:
    links = ImposedLinks("127.1.0.2", {"127.2.0.2": ImposedLink("oslo–rome", 1e6, 0.1)})
    assert msgspec.json.decode(msgspec.json.encode(links), type=ImposedLinks) == links
