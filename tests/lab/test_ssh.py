"""Three hosts of a lab with a real sshd on each: lockstep and swarm over ssh, and what is left when something is killed."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from atoll.cluster import dump_cluster, make_cluster, make_site
from atoll.events import StepFinished, read_events
from atoll.lab import Lab
from atoll.lab.lab import LabProcess
from atoll.lab.world import why_no_namespaces
from tests.runtime.supervise.sshd import Keys, why_no_sshd

WHY_NOT = ("an sshd on port 22 of a namespace needs root" if os.geteuid() else None) or why_no_sshd() or why_no_namespaces()
pytestmark = [pytest.mark.timeout(400), pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")]

HOSTS = ("site-0", "site-1", "site-2")
SCRIPT = """
import os, time
import torch
from torch import nn
import atoll

class Data:
    served = 0

    def __len__(self):
        return 24

    def __getitem__(self, index):
        Data.served += 1  # more than capturing asks for: the run is under way
        while WAITS and Data.served > 150 and not os.path.exists(WAITS):
            time.sleep(0.05)
        draw = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=draw), torch.randn(3, generator=draw)

def loss(model, batch):
    inputs, wanted = batch
    return ((model(inputs) - wanted) ** 2).mean()

WAITS = {waits!r}
job = atoll.Job(
    model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), loss=loss, data=Data(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1), batch_size=12, steps=120 if WAITS else 6, name="small",
)
"""
LOCKSTEP = (
    "plan v1 graph=small cluster=three mode=lockstep schedule=1f1b batch=12 micro_batch=4\n"
    "stage 0: layers 0-1: site-0/0=4 site-1/0=4 site-2/0=4\n"
)
SWARM = (
    "plan v1 graph=small cluster=three mode=swarm schedule=1f1b batch=12 micro_batch=4\n"
    "stage 0: layers 0-1: site-0/0=4 site-1/0=4 site-2/0=4\n"
)


class Office:
    """Three hosts, each with its own sshd; `atoll run` is started on the first, as a person would."""

    def __init__(self, lab: Lab, folder: Path, keys: Keys) -> None:
        self.lab, self.folder, self.keys = lab, folder, keys

    def run(self, mode: str, *, out: Path, waits: str = "", elsewhere: str = "") -> LabProcess:
        """What it prints is in `log`. `elsewhere` is where the last host is said to be."""
        project = self.folder / "project"
        project.mkdir(exist_ok=True)
        (project / "train.py").write_text(SCRIPT.replace("{waits!r}", repr(waits)))
        (project / "p.plan").write_text(LOCKSTEP if mode == "lockstep" else SWARM)
        hosts = tuple(
            msgspec.structs.replace(
                host, address=self.lab.address(host.name), python=sys.executable, workdir=str(self.folder / f"at-{host.name}")
            )
            for host in self.lab.cluster.hosts
        )
        if elsewhere:
            hosts = (*hosts[:-1], msgspec.structs.replace(hosts[-1], address=elsewhere))
        cluster = msgspec.structs.replace(self.lab.cluster, sites=(msgspec.structs.replace(self.lab.cluster.sites[0], hosts=hosts),))
        (project / "c.toml").write_text(dump_cluster(cluster))
        atoll = [sys.executable, "-c", "from atoll.cli.main import main; main()"]
        options = ["--plan", f"{project}/p.plan", "-c", f"{project}/c.toml", "--mode", mode, "--sync", "--out", str(out)]
        environ = {"ATOLL_LAB": "", "GLOO_SOCKET_IFNAME": "", "ATOLL_SSH": self.keys.client(), "COLUMNS": "200"}
        with self.log(out).open("wb") as log:
            return self.lab.start("site-0", [*atoll, "run", f"{project}/train.py", *options], environ=environ, stdout=log, stderr=log)

    def log(self, out: Path) -> Path:
        return out.with_suffix(".log")

    def processes(self, host: str, *words: str) -> list[psutil.Process]:
        """Those of a host whose command, or name if they were forked, has one of these words."""
        found = []
        for pid in self.lab.world.processes(host):
            try:
                process = psutil.Process(pid)
                known = " ".join([process.name(), *process.cmdline()])
                if any(word in known for word in words) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def nothing_is_left(self) -> None:
        """Fails by the test's time-out."""
        while any(self.processes(host, "atoll", "json.loads(open(0") for host in HOSTS):
            time.sleep(0.1)


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Office]:
    folder = tmp_path_factory.mktemp("office")
    cluster = make_cluster("three", [make_site("site", hosts=3, kind="T4", network="1 Gbit/s")])
    keys = Keys(folder / "keys")
    with Lab(cluster) as lab:
        for host in HOSTS:
            address = lab.address(host)
            lab.start(host, keys.server(host, address=address, port=22, known_as=address), stderr=subprocess.DEVNULL)
        for host in HOSTS:
            lab.run("site-0", [sys.executable, "-c", WAIT_FOR_PORT, lab.address(host)])
        yield Office(lab, folder, keys)


WAIT_FOR_PORT = """
import socket, sys, time
while True:
    try: socket.create_connection((sys.argv[1], 22), 1).close(); break
    except OSError: time.sleep(0.05)
"""


def losses(out: Path) -> list[float]:
    return [event.loss for event in read_events(out / "events.jsonl") if isinstance(event, StepFinished)]


def until(condition: "object", process: LabProcess, log: Path) -> None:
    """Fails by the test's time-out, or when the run has ended."""
    assert callable(condition)
    while not condition():
        assert process.returncode is None, log.read_text()
        time.sleep(0.1)


def test_lockstep_and_swarm_over_ssh_train_what_one_process_does(office: Office, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    first = office.run("lockstep", out=tmp_path / "lockstep")
    assert first.wait(300) == 0, office.log(tmp_path / "lockstep").read_text()
    said = office.log(tmp_path / "lockstep").read_text()
    assert "starting 3 processes on 2 hosts over ssh and this machine, one a device" in said
    assert (office.folder / "at-site-1" / "train.py").exists()  # --sync
    assert not (office.folder / "at-site-0").exists()  # this machine
    second = office.run("swarm", out=tmp_path / "swarm")
    assert second.wait(300) == 0, office.log(tmp_path / "swarm").read_text()
    atoll = [sys.executable, "-c", "from atoll.cli.main import main; main()"]
    subprocess.run([*atoll, "run", f"{office.folder}/project/train.py", "--alone", "--out", str(alone)], check=True, capture_output=True)
    assert losses(tmp_path / "lockstep") == pytest.approx(losses(alone), rel=1e-5)
    assert losses(tmp_path / "swarm") == pytest.approx(losses(alone), rel=1e-5)
    office.nothing_is_left()


@pytest.mark.parametrize("mode", ["lockstep", "swarm"])
def test_a_killed_supervisor_leaves_nothing_on_any_host(mode: str, office: Office, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = office.run(mode, out=out, waits=str(tmp_path / "never"))
    there = ("atoll.cli.worker", "rank 0") if mode == "lockstep" else ("atoll.cli.swarm_process", "worker-0")
    until(lambda: all(office.processes(host, *there) for host in HOSTS), process, office.log(out))
    running = office.processes("site-0", " run ")
    (supervisor,) = [one for one in running if one.ppid() not in {other.pid for other in running}]  # the others were forked from it
    supervisor.send_signal(signal.SIGKILL)
    process.wait(60)
    office.nothing_is_left()


def test_a_killed_rank_of_another_host_ends_everybody_with_a_sentence_that_names_it(office: Office, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = office.run("lockstep", out=out, waits=str(tmp_path / "never"))
    until(lambda: "small: " in office.log(out).read_text(), process, office.log(out))
    for rank in office.processes("site-2", "atoll.cli.worker"):
        rank.send_signal(signal.SIGKILL)
    assert process.wait(60) == 1
    said = office.log(out).read_text()
    assert re.search(r"rank 2 \(site-2/0, stage 0\) died .*\(signal 9\); every rank stops", said), said
    office.nothing_is_left()


def test_a_killed_worker_of_another_host_is_named_and_the_swarm_goes_on(office: Office, tmp_path: Path) -> None:
    out, go = tmp_path / "run", tmp_path / "go"
    process = office.run("swarm", out=out, waits=str(go))
    until(lambda: "worker-2 joined" in office.log(out).read_text(), process, office.log(out))
    for worker in office.processes("site-2", "atoll.cli.swarm_process"):
        worker.send_signal(signal.SIGKILL)
    until(lambda: "worker-2 on site-2 died" in office.log(out).read_text(), process, office.log(out))
    go.touch()
    assert process.wait(300) == 0, office.log(out).read_text()
    assert "worker-2 on site-2 died (signal 9); the run continues without it" in office.log(out).read_text()
    office.nothing_is_left()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("10.98.0.1", "host 'site-2': there is no route to 10.98.0.1; is it on, and on this network?"),
        ("10.99.0.1", "host 'site-2': 10.99.0.1 does not answer; is it on, and reachable from here?"),
    ],
)
def test_a_host_that_cannot_be_reached_is_told(address: str, said: str, office: Office, tmp_path: Path) -> None:
    office.lab.run("site-0", ["ip", "route", "replace", "unreachable", "10.98.0.1"])
    process = office.run("lockstep", out=tmp_path / "run", elsewhere=address)
    assert process.wait(120) == 2
    assert said in office.log(tmp_path / "run").read_text()


def test_lockstep_refuses_a_host_that_does_not_see_the_runs_directory(office: Office, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    office.lab.run("site-2", ["mount", "-t", "tmpfs", "none", str(own)])  # of that host alone: its mounts are its own
    try:
        process = office.run("lockstep", out=own / "run")
        assert process.wait(120) == 2, office.log(own / "run").read_text()
    finally:
        office.lab.run("site-2", ["umount", str(own)])
    said = " ".join(office.log(own / "run").read_text().split())
    assert f"host 'site-2': it does not see the run's directory {own / 'run'}, where ranks read the plan and write checkpoints" in said
    assert "put it (--out) on a file system that all hosts mount at the same path, or train with --mode swarm" in said
    assert "host 'site-1'" not in said
    assert not list((own / "run").glob(".shared-*"))
    office.nothing_is_left()
