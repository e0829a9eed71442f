"""A run's directory is held by one process, and by nobody once that is gone; damage of what a run is continued from is noticed."""

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.cli.main import run
from atoll.cluster import dump_cluster, make_cluster, make_site
from atoll.control.settings import Settings
from atoll.errors import AtollError, JobError
from atoll.events import EventLog
from atoll.plan import load_plan, parse_plan
from atoll.runtime.modes.swarm.spec import SwarmSpec, read_spec, read_start, write_spec, write_start
from atoll.runtime.run_directory import LOCK, RunDirectory, RunSettings, run_lock, with_checksum

HOLD = """
import sys, time
from pathlib import Path
from atoll.runtime.run_directory import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("what", ["settings", "plan", "swarm", "start", "events"])
def test_a_run_that_cannot_begin_for_a_full_disk_says_so(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    directory, settings = RunDirectory(tmp_path), Settings(stages=1, micro_batches=1, steps=1)
    spec = SwarmSpec(script_name="s", script="", arguments=(), bounds=(0, 2), micro_batches=((0, 2),), settings=settings, fingerprint={})
    plan = parse_plan("plan v1 graph=g cluster=c batch=4 micro_batch=4\nstage 0: layers 0-0: h/0=4\n")
    begin: dict[str, Callable[[], object]] = {
        "settings": lambda: directory.create(RunSettings(script="train.py")),
        "plan": lambda: directory.write_plan(plan),
        "swarm": lambda: write_spec(directory, spec),
        "start": lambda: write_start(directory, "127.0.0.1:1"),
        "events": lambda: EventLog(tmp_path),
    }
    monkeypatch.setattr(os, "write" if what == "events" else "replace", full)
    with pytest.raises(AtollError, match=f"{tmp_path}: cannot write the run there: No space left on device"):
        begin[what]()


def test_who_holds_it_is_named_and_the_dead_hold_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        where = f"process {process.pid} on {socket.gethostname()}"
        with (
            pytest.raises(JobError, match=rf"{tmp_path}: a run is under way in it \({where}\); wait until it has ended"),
            run_lock(tmp_path),
        ):
            pass
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    with run_lock(tmp_path):
        assert str(os.getpid()) in (tmp_path / LOCK).read_text()
        with pytest.raises(JobError, match="a run is under way"), run_lock(tmp_path):
            pass
    with run_lock(tmp_path):
        pass


def test_what_it_cannot_say_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("rubbish of another program")
    with run_lock(tmp_path):
        (tmp_path / LOCK).write_text("{")
        with pytest.raises(JobError, match="a run is under way in it; wait"), run_lock(tmp_path):
            pass
    with pytest.raises(AtollError, match="cannot write the run there"), run_lock(tmp_path / LOCK / "inside"):
        pass


PLAN = "plan v1 graph=g cluster=c mode=lockstep schedule=1f1b batch=4 micro_batch=2\nstage 0: layers 0-1: s-0/0=2\n"
READERS: dict[str, Callable[[RunDirectory], object]] = {
    "run.json": RunDirectory.settings,
    "plan.json": RunDirectory.plan,
    "cluster.toml": RunDirectory.load_cluster,
    "swarm.json": lambda it: read_spec(it.path),
    "started.json": read_start,
}


@pytest.fixture
def written(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create(RunSettings(script="/s.py", arguments=("--rate", "0.1"), checkpoint_every=16, options={"workers": 4}))
    directory.write_plan(parse_plan(PLAN))
    directory.write("cluster.toml", with_checksum(dump_cluster(make_cluster("c", [make_site("s", kind="T4")])).encode()))
    settings = Settings(stages=1, micro_batches=2, steps=8)
    spec = SwarmSpec(script_name="s", script="", arguments=(), bounds=(0, 2), micro_batches=((0, 2),), settings=settings, fingerprint={})
    write_spec(directory, spec)
    write_start(directory, "127.0.0.1:1", 4)
    return directory


@pytest.mark.parametrize("name", READERS)
def test_one_flipped_bit_of_what_a_run_is_continued_from_is_noticed(name: str, written: RunDirectory) -> None:
    path, read = written.path / name, READERS[name]
    whole, expected = path.read_bytes(), read(written)
    assert expected is not None
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        try:
            assert read(written) == expected, f"byte {at}"  # in the word sha256: then the rest is what it was
        except AtollError:
            continue
    path.write_bytes(whole.replace(b"4", b"5"))
    with pytest.raises(JobError, match=rf"{name}: it is not what was written: its checksum differs; .* remove sha256 from it"):
        read(written)


def test_a_file_that_somebody_changed_is_used_once_its_checksum_is_taken_out(
    written: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written.path / "run.json"
    text = path.read_text()
    path.write_text(text.replace('"checkpoint_every": 16', '"checkpoint_every": 5'))
    assert run(["run", "train.py", "--resume", str(written.path)]) == 2
    assert "run.json: it is not what was written" in " ".join(capsys.readouterr().err.split())
    path.write_text("{" + path.read_text().partition(",")[2])
    assert written.settings().checkpoint_every == 5
    written.write_settings(written.settings())
    assert path.read_text().startswith('{"sha256": "')


def test_a_file_of_an_atoll_without_checksums_is_read_and_a_plan_that_has_one_is_a_plan(written: RunDirectory, tmp_path: Path) -> None:
    (written.path / "run.json").write_text('{"format": 1, "script": "/s.py", "keep_last": 3}')
    assert written.settings().keep_last == 3
    assert load_plan(written.path / "plan.json") == written.plan() == parse_plan(PLAN)
