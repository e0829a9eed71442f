"""What sites may send each other is kept by a run of several sites, at the socket too, and its logs tell what crossed."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
import torch

from atoll.cli.main import run as atoll
from atoll.cluster import load_cluster
from atoll.codec.registry import make_codec
from atoll.control.messages import Message
from atoll.control.rounds import RoundSettings
from atoll.control.rounds.messages import GlobalChunk, UpdateChunk, UpdateId
from atoll.errors import ClusterError, RefusedError
from atoll.fabric import Fabric
from atoll.privacy.audit_log import AuditRecord, check_log, log_names
from atoll.runtime.modes.islands.borders import IslandBorders
from atoll.runtime.modes.islands.chunks import packed
from atoll.runtime.modes.islands.joining import SiteAsk, why_not
from atoll.runtime.modes.islands.spec import IslandsSpec, RoundChoice
from atoll.runtime.modes.islands.transport import RoundLetter, RoundService
from atoll.runtime.run_directory import RunDirectory
from tests.privacy.test_border import Tap
from tests.warm import run_warm

from . import island_job
from .test_faults import kill, notes_of, rounds_of, started
from .test_islands import ATOLL, EVERY_STEP, ISLANDS, check_equal, cluster, one_process, run_job

pytestmark = pytest.mark.timeout(300)
STEPS = island_job.STEPS
ALLOWED, FORBIDDEN = torch.full((40_000,), 1.2345e-7), torch.full((40_000,), 7.6543e-7)
"""Whose bytes appear nowhere by chance."""


def borders_of(path: Path, may_send: Mapping[str, list[str]], count: int = 2) -> IslandBorders:
    sites = cluster(path / "c.toml", (1,) * count, may_send)
    return IslandBorders.of(load_cluster(sites), ["oslo", "rome", "kyiv"][:count])


def records_of(run: Path) -> list[AuditRecord]:
    found = [check_log(run / "audit", name) for name in log_names(run / "audit")]
    assert not any(log.problems for log in found)
    return [record for log in found for record in log.records]


def test_a_state_that_may_not_leave_a_site_never_reaches_the_socket(tmp_path: Path) -> None:
    """The service and the messages are those of a run; over TCP in the clear, so that what passes can be seen."""
    run = RunDirectory(tmp_path / "run")
    borders = borders_of(tmp_path, {"rome": ["updates"]})
    arrived: list[Message] = []
    guards = {process: borders.guard(run, site, process) for process, site in (("oslo", "oslo"), ("rome-r1-2", "rome"))}
    service = RoundService(arrived.append, RoundSettings(rounds=1))
    with Fabric("oslo", services=[service], border=guards["oslo"]) as oslo:
        tap = Tap(oslo.listen())
        with Fabric("rome-r1-2", border=guards["rome-r1-2"]) as rome:
            remote = rome.connect(tap.address)
            state = GlobalChunk((0, 3), 0, [FORBIDDEN, FORBIDDEN])
            with pytest.raises(RefusedError, match=r"state 0\.3 chunk 0 to oslo: site 'rome' may send only updates .* and this is states"):
                remote.call_sync(RoundService.deliver, RoundLetter(state))
            update = UpdateChunk(UpdateId("rome", 1, 2), 0, packed(make_codec("none").encode(ALLOWED)))
            remote.call_sync(RoundService.deliver, RoundLetter(update))
            assert [type(message) for message in arrived] == [UpdateChunk]
            assert tap.saw(ALLOWED)
            assert not tap.saw(FORBIDDEN)
        with Fabric("rome-r1-3") as unguarded:  # and one that does not ask is refused by whom it sends to
            with pytest.raises(RefusedError, match="site 'rome' may send only updates"):
                unguarded.connect(oslo.listen()).call_sync(RoundService.deliver, RoundLetter(state))
            assert len(arrived) == 1
        tap.close()
    found = [(record.direction, record.site, record.kind, record.codec, bool(record.refused)) for record in records_of(run.path)]
    assert found == [
        ("in", "oslo", "updates", "none", False),
        ("in", "oslo", "states", "none", True),
        ("out", "rome", "states", "none", True),
        ("out", "rome", "updates", "none", False),
    ]


def test_a_run_keeps_its_borders_and_its_logs_tell_what_crossed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    file = cluster(tmp_path / "c.toml", (1, 2), {"oslo": ["updates"], "rome": ["updates", "states"]})
    run_job(["-c", str(file), *ISLANDS, *EVERY_STEP, "--out", str(run)], "sgd")
    check_equal(run, "sgd", *one_process())
    assert log_names(run / "audit") == ["coordinator", "oslo", "rome"]
    crossed = Counter((one.direction, one.site, one.peer_site, one.kind, one.codec, one.refused) for one in records_of(run))
    assert crossed == {
        (way, here, there, "updates", "none", ""): STEPS
        for here, there in (("oslo", "rome"), ("rome", "oslo"))
        for way in ("out", "in")
    }  # fmt: skip
    one = next(record for record in records_of(run) if record.direction == "out")
    elements = sum(parameter.numel() for parameter in island_job.Model().parameters())
    assert one.tensors == (("float32", (elements,)),)
    assert atoll(["audit", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {(row["site"], row["direction"], row["messages"]) for row in told["crossed"]} == {
        (site, way, STEPS) for site in ("oslo", "rome") for way in ("out", "in")
    }
    path = run / "audit" / "rome.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"kind":"updates"', b'"kind":"logits"', 1))
    assert atoll(["audit", str(run)]) == 1
    assert "record 1 was changed" in capsys.readouterr().out


def test_a_run_that_needs_what_may_not_leave_a_site_is_refused_before_it_starts(tmp_path: Path) -> None:
    file = cluster(tmp_path / "c.toml", (1, 1), {"rome": []})
    done = run_warm([*ATOLL, "run", island_job.__file__, "-c", str(file), *ISLANDS, "--out", str(tmp_path / "run"), "--", "sgd"])
    assert done.returncode == 2
    said = "site 'rome' may send nothing, and sites need updates of each other: add \"updates\" to its may_send in the cluster file"
    assert said in " ".join(done.stderr.split())
    assert not (tmp_path / "run").exists()


def test_gradients_cross_where_they_may_and_are_not_chosen_where_not(tmp_path: Path) -> None:
    run = tmp_path / "run"
    file = cluster(tmp_path / "c.toml", (1, 1), {"oslo": ["gradients"]})
    given = ["-c", str(file), "--mode", "islands", "--exchange", "gradients", "--outer-codec", "none"]
    run_job([*given, "--out", str(run)], "sgd")
    check_equal(run, "sgd", *one_process())
    crossed = Counter((one.direction, one.site, one.peer_site, one.kind, one.codec, one.refused) for one in records_of(run))
    assert {(one[0], one[1]) for one in crossed} == {("out", "oslo"), ("in", "oslo"), ("out", "rome"), ("in", "rome")}
    assert {one[3:] for one in crossed} == {("gradients", "none", "")}
    assert len(set(crossed.values())) == 1  # all that left arrived, each way
    borders = borders_of(tmp_path, {"rome": ["updates"]})
    assert "site 'rome' may send only updates, and sites need gradients of each other" in str(borders.why_not("gradients"))
    assert borders.why_not("updates") is None


def test_states_are_needed_of_a_site_that_may_send_them(tmp_path: Path) -> None:
    only = {"oslo": ["updates"], "rome": ["updates"]}
    borders = borders_of(tmp_path, only)
    borders.check("updates", 0)
    with pytest.raises(ClusterError, match=r"--max-restarts: who comes back needs .* add \"states\" to the may_send of one of them"):
        borders.check("updates", 1)
    with pytest.raises(ClusterError, match="site 'oslo' may send only updates, and sites need gradients of each other"):
        borders.check("gradients", 0)
    with pytest.raises(ClusterError, match="site 'rome' has kept nothing of the common state, which it needs of another, and site 'oslo'"):
        borders.check_kept(["oslo"])
    borders.check_kept(["oslo", "rome"])
    some = borders_of(tmp_path, {"oslo": ["updates"]})
    some.check("updates", 1)
    assert some.why_no_state("oslo") is None
    assert "site 'oslo' may send only updates" in str(some.why_no_state("rome"))
    assert not borders_of(tmp_path, {}).watched


def test_a_site_whose_rule_nobody_knows_is_not_taken_in(tmp_path: Path) -> None:
    spec = IslandsSpec(
        sites=(), settings=RoundSettings(rounds=1), choice=RoundChoice(inner_steps=1, delay_steps=0, codec="int8", learning_rate=1.0,
        momentum=0.0), reasons=(), elements=1, steps=9, batch_size=10, bucket_bytes=1, fingerprint={},
        may_send=borders_of(tmp_path, {"rome": ["updates"]}).may_send_by_site,
    )  # fmt: skip
    assert "none is known of this one" in why_not(spec, SiteAsk("kyiv", 3), (), 0)
    assert why_not(msgspec.structs.replace(spec, may_send={"oslo": None}), SiteAsk("kyiv", 3), (), 0) == ""


def test_names_of_processes_tell_their_site(tmp_path: Path) -> None:
    borders = borders_of(tmp_path, {"oslo": ["updates"]})
    names = ("coordinator", "oslo", "rome-r2", "rome-3", "rome-r2-13", "rome-x", "rom", "oslo-1-2")
    assert [borders.site_of(name) for name in names] == ["oslo", "oslo", "rome", "rome", "rome", None, None, None]
    text = (tmp_path / "c.toml").read_text("utf-8").replace('"rome"', '"oslo-1"')
    (tmp_path / "twins.toml").write_text(text, "utf-8")
    with pytest.raises(ClusterError, match="sites 'oslo-1' and 'oslo': a process of the first"):
        IslandBorders.of(load_cluster(tmp_path / "twins.toml"), ["oslo", "oslo-1"]).check("updates", 0)


def test_who_comes_back_has_the_state_of_a_site_that_may_send_it_or_is_told_why_not(tmp_path: Path) -> None:
    run, allowed = tmp_path / "run", tmp_path / "allowed"
    allowed.write_text("2")
    sites = cluster(tmp_path / "c.toml", (1, 1, 1), {"oslo": ["updates", "states"], "rome": ["updates"], "kyiv": ["updates"]})
    options = ["--inner-steps", "1", "--delay-steps", "0", "--outer-codec", "int8", "--max-restarts", "5", "--quorum", "1"]
    options += ["--equal-steps"]  # so that who waits for data has taken over the last round, and can give its state
    with started(tmp_path, str(allowed), *options, sites=sites) as (process, until):
        until(lambda: len(rounds_of(run)) >= 2)
        kill(process, "kyiv rank 0")
        allowed.write_text("4")
        until(lambda: any("of its steps with the common weights" in said for said in notes_of(run / "sites" / "kyiv")))
        kill(process, "oslo rank 0")
        until(lambda: "which no other site may send it" in (tmp_path / "log").read_text())
        allowed.write_text(str(STEPS))
        assert process.wait() == 0, (tmp_path / "log").read_text()
    log = " ".join((tmp_path / "log").read_text().split())
    assert "site 'rome' may send only updates; site 'kyiv' may send only updates: add \"states\"" in log
    crossed = Counter((one.direction, one.site, one.peer_site) for one in records_of(run) if one.kind == "states" and not one.refused)
    assert set(crossed) == {("out", "oslo", "kyiv"), ("in", "kyiv", "oslo")}
    assert not [one for one in records_of(run) if one.refused]  # nobody even asked
    assert sum("kyiv" in made for made in rounds_of(run)[4:]) > 0
    assert len(rounds_of(run)) == STEPS
