"""Members over real sockets: renewal while calls go on, revocation from another process, names that are expected."""

import threading
import time
from pathlib import Path

import pytest

from atoll.errors import PeerLostError, RefusedError
from atoll.events import AnyEvent, CertificateIssued, CertificateRevoked, PeerChanged, PeerRetried, RenewalFailed
from atoll.fabric import Backoff, Remote
from atoll.fabric.security import Authority, RunMember, enrol, serve
from tests.fabric.security.test_refusals import Board
from tests.fabric.services import Named
from tests.fabric.test_fabric import eventually


def test_certificates_are_renewed_while_connections_go_on(tmp_path: Path) -> None:
    """With certificates of five seconds: the member, the coordinator and their connection outlive the first ones by far."""
    events: list[AnyEvent] = []
    authority = Authority.create(tmp_path)
    authority.certificate_seconds = 5.0
    coordinator, address = serve(authority, "127.0.0.1:0", services=[Board()], observer=events.append)
    with coordinator, RunMember(enrol(address, authority.issue_token(), "rome")) as rome:
        first, first_of_coordinator = rome.credentials, coordinator.credentials
        remote = rome.join(address)
        remote.call_sync(Board.post, Named("x"))
        eventually(lambda: time.time() > max(first.expires_unix_seconds, first_of_coordinator.expires_unix_seconds) + 0.5)
        assert remote.call_sync(Board.post, Named("y")).name == "rome the worker: y"
        assert rome.credentials.expires_unix_seconds > first.expires_unix_seconds
        states = [event.state for event in events if isinstance(event, PeerChanged) and event.peer == "rome"]
        assert "dead" not in states, "it is the connection that was there before"
        assert any(isinstance(event, CertificateIssued) and event.how == "renewed" and event.peer == "rome" for event in events)
        again = rome.fabric.connect(address)
        assert again.call_sync(Board.post, Named("z")).name == "rome the worker: z", "new connections use the new certificates"


def test_a_renewal_that_fails_is_an_event_and_is_tried_again_until_the_certificate_ends(tmp_path: Path) -> None:
    events: list[AnyEvent] = []
    authority = Authority.create(tmp_path)
    authority.certificate_seconds = 3.0
    coordinator, address = serve(authority, "127.0.0.1:0")
    backoff = Backoff(first_seconds=0.01, largest_seconds=0.01, attempts=2)
    with RunMember(enrol(address, authority.issue_token(), "rome"), observer=events.append, backoff=backoff) as rome:
        rome.join(address)
        eventually(lambda: bool(rome.fabric.peers))
        coordinator.close()
        eventually(lambda: any(isinstance(event, RenewalFailed) and event.delay_seconds is None for event in events))
        failures = [event for event in events if isinstance(event, RenewalFailed)]
        assert failures[0].delay_seconds is not None
        assert failures[-1].expires_seconds < 0


def test_who_enrols_before_the_coordinator_listens_waits_for_it(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path)
    coordinator, address = serve(authority, "127.0.0.1:0")
    coordinator.close()
    with pytest.raises(PeerLostError, match="refused"):
        enrol(address, authority.issue_token(), "hasty")
    said, started = list[AnyEvent](), []

    def start(event: AnyEvent) -> None:
        said.append(event)
        started.append(serve(authority, address)[0])

    assert enrol(address, authority.issue_token(), "patient", patience_seconds=60.0, observer=start).name == "patient"
    started[0].close()
    (retried,) = said
    assert isinstance(retried, PeerRetried)
    assert (retried.peer, retried.reason) == (address, f"{address}: Connection refused; retrying for 60 s")


def test_of_several_addresses_the_one_that_coordinates_is_found_again_when_it_changes(tmp_path: Path) -> None:
    """A stand-in at another address: who has both goes on with it, with the same `Remote`."""
    authority = Authority.create(tmp_path)
    coordinator, first = serve(authority, "127.0.0.1:0", services=[Board()])
    coordinator.close()
    standby, second = serve(authority, "127.0.0.1:0", services=[Board()])
    both = f"{first},{second}"
    with standby, RunMember(enrol(both, authority.issue_token(), "rome")) as rome:
        remote = rome.join(both)
        assert remote.call_sync(Board.post, Named("x")).name == "rome the worker: x"
        standby.close()
        with serve(authority, first, services=[Board()])[0]:
            assert posted(remote) == "rome the worker: y"


def posted(remote: Remote) -> str:
    """What is answered once the call does not fall into the moment of the change."""
    while True:
        try:
            return remote.call_sync(Board.post, Named("y")).name
        except PeerLostError:
            assert remote.given_up is None


def test_a_host_nobody_knows_is_not_waited_for(tmp_path: Path) -> None:
    token = Authority.create(tmp_path).issue_token()
    with pytest.raises(RefusedError, match="no such host"):
        enrol("nobody.invalid:7000", token, "lost", patience_seconds=600.0)


def test_a_revocation_by_another_process_reaches_the_run(tmp_path: Path) -> None:
    """The ledger is what processes share: `revoke` in one is seen by the one that serves."""
    heard: list[AnyEvent] = []
    authority = Authority.create(tmp_path)
    coordinator, address = serve(authority, "127.0.0.1:0", services=[Board()])
    token = authority.issue_token(uses=2)
    with (
        coordinator,
        RunMember(enrol(address, token, "rome"), observer=heard.append) as rome,
        RunMember(enrol(address, token, "oslo")) as oslo,
    ):
        remotes = [member.join(address) for member in (rome, oslo)]
        for remote in remotes:
            remote.call_sync(Board.post, Named("x"))
        Authority.open(tmp_path).revoke("oslo", "its disk lies")
        eventually(lambda: remotes[1].given_up is not None)
        eventually(lambda: any(isinstance(event, CertificateRevoked) and event.peer == "oslo" for event in heard))
        assert remotes[0].call_sync(Board.post, Named("y")).name == "rome the worker: y"
        with RunMember(enrol(address, authority.issue_token(), "late")) as late:
            late.join(address)
            eventually(lambda: late.revocations.number == 1)


def test_whoever_is_found_must_be_who_was_expected(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path)
    coordinator, address = serve(authority, "127.0.0.1:0", services=[Board()])
    with coordinator, RunMember(enrol(address, authority.issue_token(uses=2), "rome"), services=[Board()]) as rome:
        oslo_at = rome.fabric.listen()
        with pytest.raises(RefusedError, match="oslo was to be reached there, but it is coordinator"):
            rome.fabric.connect(address, name="oslo").call_sync(Board.post, Named("x"))
        with (
            RunMember(authority.credentials("bern", "worker")) as bern,
            pytest.raises(RefusedError, match=r"the coordinator was to be reached there, but it is rome \(worker\)"),
        ):
            bern.join(oslo_at).call_sync(Board.post, Named("x"))
        with pytest.raises(RefusedError, match=r"is rome \(worker\), which enrols nobody"):
            enrol(oslo_at, authority.issue_token(), "turin")


def test_leaving_leaves_no_threads(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path)
    before = threading.active_count()
    for _ in range(3):
        coordinator, address = serve(authority, "127.0.0.1:0", services=[Board()])
        with coordinator, RunMember(authority.credentials("rome", "worker")) as rome:
            rome.join(address).call_sync(Board.post, Named("x"))
    eventually(lambda: threading.active_count() <= before)
