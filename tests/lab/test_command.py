"""`atoll lab` as a user meets it: what is wrong is said in a sentence, with exit code 2, and nothing is started."""

from pathlib import Path

import pytest

from atoll.cli.main import run
from atoll.cluster import dump_cluster
from tests.lab.clusters import two_sites


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    path = tmp_path / "c.toml"
    path.write_text(dump_cluster(two_sites()))
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "give a cluster file and a command"),
        (["--all"], "give a cluster file and a command"),
        (["--host", "paris", "--", "true"], "has no such host; there are oslo-0"),
        (["--host", "oslo-0", "--all", "--", "true"], "exclude one another"),
        (["--fault", "3s break rome-0", "--", "true"], "no kind of fault is called 'break'"),
        (["--faults", "none.toml", "--", "true"], "none.toml: cannot be read"),
    ],
)
def test_mistakes_are_sentences(cluster: str, arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lab", cluster, *arguments]) == 2
    assert reason in " ".join(capsys.readouterr().err.split())


def test_a_cluster_that_is_none_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lab", "none.toml", "--", "true"]) == 2
    assert "none.toml: there is no such file" in capsys.readouterr().err


def test_cleaning_is_always_possible(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lab", "--clean"]) == 0
    assert capsys.readouterr().out


def test_a_lab_without_namespaces_says_what_is_not_imposed(cluster: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run(["lab", cluster, "--loopback", "--all", "--out", str(out), "--", "sh", "-c", "echo on $ATOLL_LAB_HOST; exit 5"]) == 5
    said = capfd.readouterr()
    assert sorted(said.out.splitlines()) == [f"[{host}] on {host}" for host in ("oslo-0", "oslo-1", "rome-0", "rome-1")]
    assert "on nothing else" in " ".join(said.err.split())
    assert (out / "events.jsonl").exists()


def test_every_device_gets_the_rank_that_torchrun_would_give_it(cluster: str, capfd: pytest.CaptureFixture[str]) -> None:
    command = "echo $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, to $MASTER_ADDR"
    assert run(["lab", cluster, "--loopback", "--devices", "--", "sh", "-c", command]) == 0
    hosts = ("oslo-0", "oslo-1", "rome-0", "rome-1")
    expected = [f"[{host}/0] {rank} of 4, 0 of 1, to 127.1.0.2" for rank, host in enumerate(hosts)]
    assert sorted(capfd.readouterr().out.splitlines()) == expected
