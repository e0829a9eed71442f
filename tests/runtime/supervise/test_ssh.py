"""Processes over a real ssh server: output, ends, signals, orphans, copies, and a sentence for each way it can fail."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from atoll.cluster import Cluster, make_cluster, make_site
from atoll.cluster.cluster import Host
from atoll.errors import AtollError, ClusterError
from atoll.runtime.supervise.hosts import ProcessSpec, ThisMachine
from atoll.runtime.supervise.placement import copy_directory, place_processes
from atoll.runtime.supervise.ssh import SSH, OverSsh
from tests.gone import wait_until_gone
from tests.runtime.supervise.sshd import Keys, local_sshd, why_no_sshd
from tests.runtime.supervise.test_supervisor import Noted

pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(why_no_sshd() is not None, reason=why_no_sshd() or "")]


class Far:
    """A host behind the server of these tests, which calls itself `far`."""

    def __init__(self, keys: Keys, port: int) -> None:
        self.keys, self.port = keys, port
        self.alias = {"far.example": f"HostName 127.0.0.1\nPort {port}\n"}

    def environ(self, **options: str) -> dict[str, str]:
        return {SSH: self.keys.client(self.alias, **options)}

    def cluster(self, **fields: str) -> Cluster:
        """One host with an address, and its fields."""
        cluster = make_cluster("two", [make_site("far", kind="T4")])
        host = msgspec.structs.replace(cluster.hosts[0], **{"address": "far.example", **fields})
        return msgspec.structs.replace(cluster, sites=(msgspec.structs.replace(cluster.sites[0], hosts=(host,)),))

    def host(self, directory: str = "~", **fields: str) -> OverSsh:
        return OverSsh(self.cluster(**fields).hosts[0], self.environ(), directory)


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Far]:
    with local_sshd(tmp_path_factory.mktemp("ssh")) as (keys, port):
        yield Far(keys, port)


def start(noted: Noted, host: OverSsh, name: str, code: str) -> None:
    spec = ProcessSpec(
        name=name,
        role="test",
        command=(host.python, "-c", f"import os, signal, sys, time\n{code}"),
        host=host,
        environment={"WORD": "well"},
        defaults={"PATH": "nowhere", "OTHER": "default"},
        prefix=f"{name}: ",
    )
    noted.supervisor.start(spec)


def test_what_runs_there_prints_and_ends_here(far: Far, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    host, noted = far.host(str(tmp_path)), Noted()
    start(
        noted,
        host,
        "two",
        "print(os.environ['WORD'], os.environ['OTHER'], os.environ['PATH'] != 'nowhere'); print(os.getcwd()); sys.exit(3)",
    )
    start(noted, host, "killed", "sys.stderr.write('half'); sys.stderr.flush(); os.kill(os.getpid(), 9)")
    noted.run()
    assert noted.ends == {"two": "exit code 3", "killed": "signal 9"}
    printed = capfd.readouterr()
    assert printed.out.splitlines() == ["two: well default True", f"two: {tmp_path}"]
    assert printed.err.splitlines() == ["killed: half"]
    assert host.cores >= 1


def test_a_signal_reaches_it_and_what_it_left_running_is_killed(far: Far, capfd: pytest.CaptureFixture[str]) -> None:
    host, noted = far.host(), Noted()
    leaves = (
        "import subprocess; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)']); print(child.pid, flush=True)"
    )
    ends = f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(4)); os.kill({os.getpid()}, signal.SIGTERM); signal.pause()"
    start(noted, host, "one", f"{leaves}\n{ends}")
    noted.run()
    assert noted.ends == {"one": "exit code 4"}
    wait_until_gone([int(capfd.readouterr().out.removeprefix("one: "))])


def test_what_cannot_be_started_is_said(far: Far) -> None:
    host, noted = far.host("/no/such/directory"), Noted()
    start(noted, host, "one", "")
    noted.run()
    assert noted.ends == {"one": "cannot be started on far-0: /no/such/directory: No such file or directory"}


SUPERVISOR = """
import os, sys
from tests.runtime.supervise.test_ssh import Far, Keys, start
from tests.runtime.supervise.test_supervisor import Noted
from pathlib import Path
keys = Keys.__new__(Keys); keys.folder = Path(sys.argv[1])
far, noted = Far(keys, int(sys.argv[2])), Noted()
host = far.host()
start(noted, host, "one", "print(os.getpid(), os.getppid(), flush=True); signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)")
noted.run()
print(noted.ends, flush=True)
"""


@pytest.mark.parametrize("victim", ["supervisor", "ssh", "agent", "session"])
def test_nothing_outlives_the_connection_however_it_ends(victim: str, far: Far) -> None:
    command = [sys.executable, "-c", SUPERVISOR, str(far.keys.folder), str(far.port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]) as process:
        assert process.stdout is not None
        rank, agent = map(int, process.stdout.readline().removeprefix("one: ").split())
        ssh = [child.pid for child in psutil.Process(process.pid).children()]
        assert len(ssh) == 1
        victims = {"supervisor": process.pid, "ssh": ssh[0], "agent": agent, "session": psutil.Process(agent).ppid()}
        os.kill(victims[victim], signal.SIGKILL)
        wait_until_gone([rank, agent, *ssh])
        if victim != "supervisor":
            assert "the ssh connection to far-0 was lost" in process.stdout.readline()


SCRIPT = "job = 1\n"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "project" / "train.py"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    (tmp_path / "run").mkdir()
    return path


def refused(far: Far, script: Path, environ: dict[str, str] | None = None, *, sync: bool = False, **fields: str) -> str:
    """Why a host with these fields is not used."""
    fields = {"python": sys.executable, "workdir": str(script.parent), **fields}
    with pytest.raises(AtollError) as error:
        place_processes(
            ["far-0"],
            far.cluster(**fields),
            environ or far.environ(),
            script=script,
            run=script.parent.parent / "run",
            sync=sync,
            shared=True,
            say=lambda line: None,
        )
    return str(error.value)


def test_a_host_that_has_everything_is_used(far: Far, script: Path) -> None:
    cluster, run = far.cluster(python=sys.executable, workdir=str(script.parent)), script.parent.parent / "run"
    placement = place_processes(["far-0"], cluster, far.environ(), script=script, run=run, shared=True, say=print)
    assert (placement.address, placement.where) == ("127.0.0.1", "on 1 host over ssh")
    assert placement.scripts == {"far-0": str(script)}
    assert not list(run.iterdir())  # what was tried out is gone
    placement.close()


def test_hosts_of_this_machine_and_without_addresses_are_started_here(far: Far, script: Path) -> None:
    for fields in ({"address": ""}, {"address": "localhost"}, {"address": "127.0.0.1"}):
        placement = place_processes(
            ["far-0"], far.cluster(**fields), far.environ(), script=script, run=script.parent, shared=True, say=print
        )
        assert isinstance(placement.hosts["far-0"], ThisMachine)
        assert placement.address == "127.0.0.1"


def test_a_host_without_an_address_among_others_is_refused(far: Far, script: Path) -> None:
    sites = [make_site("far", hosts=2, kind="T4")]
    cluster = make_cluster("two", sites)
    hosts: tuple[Host, ...] = tuple(
        msgspec.structs.replace(host, address="far.example" if i else "") for i, host in enumerate(cluster.hosts)
    )
    cluster = msgspec.structs.replace(cluster, sites=(msgspec.structs.replace(cluster.sites[0], hosts=hosts),))
    with pytest.raises(ClusterError, match="host 'far-0' has no address, but others of the plan have"):
        place_processes(["far-0", "far-1"], cluster, far.environ(), script=script, run=script.parent, shared=True, say=print)


def test_each_way_a_connection_fails_is_a_sentence_that_names_the_host(far: Far, script: Path) -> None:
    far.alias["closed.example"] = "HostName 127.0.0.1\nPort 9\n"
    assert refused(far, script, address="closed.example") == "host 'far-0': the connection is refused; is an ssh server running there?"
    assert refused(far, script, address="no-such-host.invalid").startswith("host 'far-0': its address no-such-host.invalid is not known")
    assert refused(far, script, far.environ(known="nobody")).startswith("host 'far-0': ssh does not trust its host key; connect once")
    far.keys._make("stranger")
    denied = refused(far, script, far.environ(key="stranger"))
    assert denied.startswith("host 'far-0': permission denied; ssh must log in without a password")
    assert "`ssh far.example` works without asking" in denied
    assert refused(far, script, user="nobody-of-that-name").startswith("host 'far-0': permission denied")
    assert refused(far, script, {SSH: "/no/such/ssh"}).startswith("host 'far-0': there is no program ssh on this machine")


def test_each_thing_that_a_host_lacks_is_a_sentence(far: Far, script: Path, tmp_path: Path) -> None:
    assert refused(far, script, python="/no/such/python") == (
        "host 'far-0': there is no Python at /no/such/python; set `python` in the cluster file to the interpreter with Atoll there"
    )
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    assert f"host 'far-0': {bare}/bin/python has no torch and no atoll; install the same versions" in refused(
        far, script, python=f"{bare}/bin/python"
    )
    packages = next(bare.glob("lib/python*/site-packages"))
    for name, number in (("torch", "1.0"), ("atoll", "0.0.1")):
        (packages / f"{name}-{number}.dist-info").mkdir()
        (packages / f"{name}-{number}.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    other = refused(far, script, python=f"{bare}/bin/python")
    assert "torch is 1.0 there and 2.13.0 here, atoll is 0.0.1 there and " in other
    assert refused(far, script, workdir="/no/such/directory").startswith("host 'far-0': there is no directory /no/such/directory; make it")
    (tmp_path / "elsewhere").mkdir()
    moved = script.rename(tmp_path / "elsewhere" / "train.py")
    shutil.copytree(tmp_path / "elsewhere", tmp_path / "there")
    (tmp_path / "there" / "train.py").write_text("job = 2\n")
    assert place_there(far, moved, tmp_path / "there") == {"far-0": str(moved)}  # where it is here, too


def place_there(far: Far, script: Path, workdir: Path) -> object:
    cluster = far.cluster(python=sys.executable, workdir=str(workdir))
    placement = place_processes(["far-0"], cluster, far.environ(), script=script, run=workdir, shared=False, say=print)
    placement.close()
    return placement.scripts


@pytest.mark.parametrize("rsync", [True, False])
def test_a_directory_is_copied_without_what_is_made_from_it(rsync: bool, far: Far, script: Path, tmp_path: Path) -> None:
    if rsync and shutil.which("rsync") is None:
        pytest.skip("no rsync")
    folder, there = script.parent, tmp_path / "deep" / "there"
    (folder / "pack" / "__pycache__").mkdir(parents=True)
    (folder / "pack" / "part.py").write_text("x = 1\n")
    (folder / "pack" / "__pycache__" / "part.pyc").touch()
    (folder / "mine").mkdir()
    (folder / "mine" / "run.json").touch()
    there.mkdir(parents=True)
    (there / "kept").touch()
    host = far.host(str(there), python=sys.executable)
    copy_directory(host, folder, folder / "mine", rsync=rsync)
    host.close()
    assert sorted(str(path.relative_to(there)) for path in there.rglob("*")) == ["kept", "pack", "pack/part.py", "train.py"]
    assert (there / "train.py").read_text() == SCRIPT


def test_a_copy_that_fails_is_a_sentence(far: Far, script: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = refused(far, script, sync=True, workdir=str(tmp_path / "file" / "there"))
    assert said.startswith(f"host 'far-0': the directory {tmp_path}/file/there cannot be made there: NotADirectoryError")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a full disk, which only root can make")
@pytest.mark.parametrize("rsync", [True, False])
def test_a_full_disk_is_a_sentence(rsync: bool, far: Far, script: Path, tmp_path: Path) -> None:
    if rsync and shutil.which("rsync") is None:
        pytest.skip("no rsync")
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(small)], check=False, capture_output=True).returncode:
        pytest.skip("no file systems can be mounted here")
    try:
        (script.parent / "large").write_bytes(bytes(1 << 20))
        host = far.host(str(small), python=sys.executable)
        with pytest.raises(AtollError, match=r"host 'far-0': copying .* to .*small: the disk there is full"):
            copy_directory(host, script.parent, tmp_path / "run", rsync=rsync)
        host.close()
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
