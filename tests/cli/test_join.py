"""`atoll join` against an authority that is served, over real sockets."""

import asyncio
import io
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.cli.join import _News, farewell
from atoll.cli.main import run
from atoll.control.rounds import RoundSettings
from atoll.control.rounds.messages import SiteJoined
from atoll.control.settings import Settings
from atoll.events import PeerChanged, PeerRetried
from atoll.fabric.security import Authority, Credentials, RunMember, serve
from atoll.runtime.modes.islands.joining import Admission, JoinService, SiteAsk, SiteJob, why_not
from atoll.runtime.modes.islands.spec import IslandsSpec, RoundChoice, SiteSpec, read_islands
from atoll.runtime.modes.swarm.member_process import ending_of
from atoll.runtime.modes.swarm.spec import JobService, Start, SwarmSpec
from atoll.runtime.run_directory import RunDirectory
from tests.fabric.test_fabric import eventually

Served = tuple[Authority, RunMember, str]


@pytest.fixture
def of_sites(tmp_path: Path) -> Iterator[tuple[str, str, list[SiteAsk]]]:
    """Where sites train together and take in who asks twice: the address, a token, and who asked."""
    authority, asked = Authority.create(tmp_path / "run"), list[SiteAsk]()
    spec = IslandsSpec(
        sites=(SiteSpec("oslo", 0, 4), SiteSpec("rome", 4, 10)),
        settings=RoundSettings(rounds=9), bucket_bytes=1,
        choice=RoundChoice(inner_steps=2, delay_steps=0, codec="none", learning_rate=1.0, momentum=0.0),
        reasons=(), elements=5, steps=100, batch_size=10, fingerprint={},
    )  # fmt: skip
    job = SiteJob(spec=spec, script_name="train.py", script="1 / 0", arguments=("a",), start=Start(0.0, 0.0, ""))

    def answer(ask: SiteAsk) -> Admission:
        asked.append(ask)
        reason = why_not(spec, ask, (), 20)
        return Admission((SiteJoined(ask.site, ask.samples, 20),) if len(asked) > 1 else None, reason)

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    coordinator, address = serve(authority, "127.0.0.1:0", services=[JoinService(lambda: job, answer, loop)])
    with coordinator:
        yield address, authority.issue_token("worker", uses=9), asked
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_a_site_is_told_its_samples_and_finds_the_run_in_its_directory(
    of_sites: tuple[str, str, list[SiteAsk]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The script that it was sent is the run's: this one ends at once."""
    address, token, asked = of_sites
    out = tmp_path / "kyiv"
    assert run(["join", address, "--token", token, "--site", "kyiv", "--out", str(out)]) == 2
    told = capfd.readouterr()
    assert "kyiv takes part from step 21 on, where a global batch has 14 samples: kyiv's are the 4 from number 11 on" in told.out
    assert "division by zero" in told.err
    assert asked == [SiteAsk("kyiv", 4)] * 2
    spec = read_islands(out)
    assert spec.site("kyiv") == SiteSpec("kyiv", 10, 14, 20, joined=True)
    assert RunDirectory(out / "sites" / "kyiv").settings().arguments == ("a",)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "the sites of this run train together: give --site NAME"),
        (["--site", "rome"], "rome cannot join: the run has a site of this name"),
        (["--site", "kyiv", "--samples", "2", "--devices", "3"], "2 samples of a batch cannot be shared by so many"),
    ],
)
def test_what_a_site_cannot_be(
    of_sites: tuple[str, str, list[SiteAsk]], given: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address, token, _ = of_sites
    assert run(["join", address, "--token", token, "--out", str(tmp_path / "x"), *given]) != 0
    assert said in capsys.readouterr().err


def test_there_are_no_sites_where_none_train_together(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    authority, _, address = served
    assert run(["join", address, "--token", authority.issue_token("worker"), "--site", "kyiv"]) != 0
    assert "--site kyiv: the sites of this run exchange no updates that" in capsys.readouterr().err


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Authority, RunMember, str]]:
    authority = Authority.create(tmp_path / "run")
    coordinator, address = serve(authority, "127.0.0.1:0")
    with coordinator:
        yield authority, coordinator, address


def test_joining_enrols_connects_and_says_what_it_got(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    authority, coordinator, address = served
    token = authority.issue_token("observer")
    keys = tmp_path / "keys"
    assert run(["join", address, "--token", token, "--name", "oslo", "--keys", str(keys), "--check"]) == 0
    told = capsys.readouterr()
    assert f"Enrolled as oslo (observer) in run {authority.run}" in told.out
    assert "renewed while this runs" in told.out
    assert f"Connected to coordinator at {address}" in told.out
    assert token not in told.out + told.err
    eventually(lambda: "oslo" in coordinator.fabric.peers)
    assert coordinator.fabric.peer("oslo").role == "observer"
    assert Credentials.load(keys).name == "oslo"
    assert stat.S_IMODE((keys / "member.key").stat().st_mode) == 0o600


def test_a_token_from_standard_input_and_a_name_of_its_own(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, coordinator, address = served
    monkeypatch.setattr(sys, "stdin", io.StringIO(authority.issue_token() + "\n"))
    assert run(["join", address, "--token", "-", "--check"]) == 0
    eventually(lambda: len(coordinator.fabric.peers) == 1)


@pytest.mark.parametrize(
    ("address", "token", "said"),
    [
        ("nonsense", None, "'nonsense' is no address; write it like 'host:port'"),
        ("127.0.0.1:1", None, "127.0.0.1:1: Connection refused"),
        (None, "atoll1.abc", "this is no join token, or not all of one"),
        (None, "used", "the token is used up"),
    ],
    ids=["no address", "nobody there", "no token", "used up"],
)
def test_what_goes_wrong_is_one_sentence(
    served: Served, capsys: pytest.CaptureFixture[str], address: str | None, token: str | None, said: str
) -> None:
    authority, _, there = served
    good = authority.issue_token()
    if token == "used":
        assert run(["join", there, "--token", good, "--check"]) == 0
    assert run(["join", address or there, "--token", token if token == "atoll1.abc" else good, "--timeout", "0"]) == 1
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("address", "token", "said"),
    [
        ("127.0.0.1:1", "garbage", "this is no join token"),
        ("localhost", None, "'localhost' is no address; write it like 'host:port'"),
        ("127.0.0.1:1,localhost", None, "'localhost' is no address"),
    ],
)
def test_mistakes_are_told_before_pytorch_is_loaded(address: str, token: str | None, said: str, tmp_path: Path) -> None:
    good = Authority.create(tmp_path / "run").issue_token()
    code = "import sys; from atoll.cli.main import run; print(run(sys.argv[1:]), 'torch' in sys.modules)"
    command = [sys.executable, "-c", code, "join", address, "--token", token or good]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    assert told.stdout == "1 False\n"
    assert said in told.stderr


def spec_with(script: str, program: str = "") -> SwarmSpec:
    return SwarmSpec(
        script_name="train.py",
        script=script,
        arguments=(),
        bounds=(0, 1, 2),
        micro_batches=((0, 1),),
        settings=Settings(stages=2, micro_batches=1, steps=1),
        fingerprint={},
        program=program,
    )


JOB = """
import torch, atoll
from torch import nn
job = atoll.Job(
    model=lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), loss=lambda model, batch: model(batch).mean(),
    data=list(torch.zeros(4, 2)), optimizer=torch.optim.SGD, batch_size=2, steps=1,
)
"""


def test_a_machine_that_captures_another_program_than_the_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    authority = Authority.create(tmp_path / "run")
    coordinator, address = serve(authority, "127.0.0.1:0", services=[JobService(spec_with(JOB, program="of other layers"))])
    with coordinator:
        assert run(["join", address, "--token", authority.issue_token("worker"), "--name", "oslo"]) == 2
    assert "error: the program captured here is not the run's: this machine has other versions" in capsys.readouterr().err


@pytest.mark.parametrize("lacking", ["import beside_it", "open('beside_it.csv')"])
def test_a_script_that_needs_more_files_than_it_is_told_how_to_bring_them(
    lacking: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    authority = Authority.create(tmp_path / "run")
    coordinator, address = serve(authority, "127.0.0.1:0", services=[JobService(spec_with(lacking))])
    with coordinator:
        assert run(["join", address, "--token", authority.issue_token("worker"), "--name", "oslo"]) == 2
    told = capsys.readouterr().err
    assert "train.py:1: " in told
    assert "The run sends its script and no other file: copy what it imports and reads to this machine, and give --script FILE" in told


@pytest.mark.parametrize("when", ["asking what there is to do", "running the script"])
def test_ctrl_c_before_there_is_work_is_told(
    when: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    if when != "running the script":
        monkeypatch.setattr("atoll.cli.join._check_stages", interrupted)
    authority = Authority.create(tmp_path / "run")
    coordinator, address = serve(authority, "127.0.0.1:0", services=[JobService(spec_with("raise KeyboardInterrupt"))])
    with coordinator:
        assert run(["join", address, "--token", authority.issue_token("worker"), "--name", "oslo"]) == 130
    assert capsys.readouterr().out.endswith("\noslo left before it had begun\n")


@pytest.mark.parametrize("also", [[], ["--check"]])
def test_more_stages_than_the_run_has_are_refused_before_anything_is_trained(
    also: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    authority = Authority.create(tmp_path / "run")
    coordinator, address = serve(authority, "127.0.0.1:0", services=[JobService(spec_with("boom"))])
    with coordinator:
        token = authority.issue_token("worker")
        assert run(["join", address, "--token", token, "--stages", "3", *also]) == 2
    told = capsys.readouterr().err
    assert "--stages 3: the run has 2 stages; a process hosts at least one and each at most once" in told
    assert "dead" not in told  # what ends because it ended is not told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        ([(0, 5), (1, 5)], "The run is over"),
        ([(0, 3), (1, 3)], "The run was stopped before its last step"),
        ([(0, 0)], "join again with the command that is printed then"),
        ([(-1, 3), (-1, 2)], "oslo has left; nothing was lost"),
        ([(-1, 3), (1, 5)], "The run is over"),
    ],
)
def test_whoever_took_part_hears_how_it_ended(workers: list[tuple[int, int]], said: str) -> None:
    assert said in farewell(ending_of(workers, 5), "oslo")


def test_it_stays_until_it_is_told_to_leave(served: Served) -> None:
    authority, coordinator, address = served
    arguments = ["join", address, "--token", authority.issue_token(), "--name", "oslo"]
    command = [sys.executable, "-c", "from atoll.cli import main; main()", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        while "Waiting: the run has no work" not in (line := process.stdout.readline()):
            assert line, "it ended by itself"
        eventually(lambda: "oslo" in coordinator.fabric.peers)
        process.send_signal(signal.SIGINT)
        assert "oslo leaves" in process.communicate(timeout=60)[0]
        assert process.returncode == 0
    eventually(lambda: coordinator.fabric.peer("oslo").state == "dead")


def test_it_ends_when_it_is_shut_out(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    authority, coordinator, address = served
    codes: list[int] = []
    token = authority.issue_token()
    thread = threading.Thread(target=lambda: codes.append(run(["join", address, "--token", token, "--name", "oslo"])))
    thread.start()
    eventually(lambda: "oslo" in coordinator.fabric.peers)
    authority.revoke("oslo", "its gradients were wrong")
    thread.join(60)
    assert codes == [1]
    assert "the certificate of oslo was revoked" in capsys.readouterr().err


def test_who_has_said_goodbye_is_not_missed(capsys: pytest.CaptureFixture[str]) -> None:
    news = _News()
    for event in (
        PeerChanged(at_seconds=0.0, peer="oslo", role="worker", state="dead", before="alive", reason="oslo left: oslo closes"),
        PeerRetried(at_seconds=0.1, peer="oslo", attempt=1, delay_seconds=0.1, reason="oslo left: oslo closes"),
        PeerRetried(at_seconds=0.2, peer="rome", attempt=1, delay_seconds=0.1, reason="refused"),
        PeerChanged(at_seconds=0.3, peer="oslo", role="worker", state="alive", before="dead", reason="connected"),
        PeerRetried(at_seconds=0.4, peer="oslo", attempt=1, delay_seconds=0.1, reason="refused"),
    ):
        news(event)
    lines = [line.strip().partition(" ")[2] for line in capsys.readouterr().err.splitlines()]  # after the time
    assert lines == [
        "oslo has left",
        "rome: retry in 100 ms: refused",
        "oslo: alive (connected)",
        "oslo: retry in 100 ms: refused",
    ]
