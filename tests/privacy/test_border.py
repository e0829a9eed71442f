"""What may leave a site: the rules by themselves, and at the socket, where a tensor that must not leave is not seen."""

import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from atoll.cluster import CONTENT_KINDS, dump_cluster, parse_cluster
from atoll.codec.base import Header
from atoll.codec.registry import make_codec
from atoll.errors import ClusterError, FabricError, RefusedError
from atoll.events import AnyEvent, PeerRefused
from atoll.fabric import CallingPeer, Fabric, Remote
from atoll.fabric.security import Authority, RunMember, serve
from atoll.fabric.service import allowed, carries
from atoll.plan.modes import mode_rules
from atoll.privacy.audit_log import AuditLog, AuditRecord, check_log
from atoll.privacy.border import BorderRules, Content, SiteBorder
from tests.fabric.services import Named

CLUSTER = """
[default_link]
bandwidth = "100 Mbit/s"
latency = "20 ms"
[[site]]
name = "oslo"
may_send = ["updates", "ids"]
  [[site.host]]
  devices = [{ kind = "T4" }]
[[site]]
name = "rome"
may_send = []
  [[site.host]]
  devices = [{ kind = "T4" }]
[[site]]
name = "bern"
  [[site.host]]
  devices = [{ kind = "T4" }]
"""


def test_rules_are_read_from_the_cluster_file_and_written_back() -> None:
    cluster = parse_cluster(CLUSTER)
    assert [site.may_send for site in cluster.sites] == [("updates", "ids"), (), None]
    assert parse_cluster(dump_cluster(cluster)) == cluster


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ('"updates"', r"may_send: must be a list of what may leave the site, like \[\"updates\"\]"),
        ('["update"]', r"nothing is called 'update'; did you mean 'updates'\?"),
        ('[["updates"]]', r"nothing is called \['updates'\]; known are updates, gradients"),
        ("[3]", "nothing is called 3"),
        ("true", "must be a list"),
    ],
)
def test_rules_that_mean_nothing_are_refused(given: str, said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        parse_cluster(CLUSTER.replace('["updates", "ids"]', given))


def test_what_may_go_from_site_to_site() -> None:
    rules = BorderRules.of(parse_cluster(CLUSTER))
    for kind in (*CONTENT_KINDS, None):
        assert rules.why_not(kind, "bern", "oslo") is None
        assert rules.why_not(kind, "oslo", "oslo") is None
        assert (rules.why_not(kind, "oslo", "rome") is None) == (kind in ("updates", "ids"))
        assert rules.why_not(kind, "oslo", None) == rules.why_not(kind, "oslo", "rome")
        assert rules.why_not(kind, "rome", "bern") is not None
        assert "of no site the cluster file knows" in (rules.why_not(kind, None, "bern") or "")
    assert rules.why_not("logits", "oslo", "rome") == (
        "site 'oslo' may send only updates, ids (may_send in the cluster file), and this is logits"
    )
    assert BorderRules({"oslo": None}).why_not(None, None, "oslo") is None


def test_no_mode_that_does_not_keep_borders_runs_across_one() -> None:
    """A rule that nobody checks would be no rule."""
    from atoll.plan import Plan, Replica, Stage

    cluster, rules = parse_cluster(CLUSTER), mode_rules("lockstep")

    def plan(*devices: str) -> Plan:
        stage = Stage(start=0, stop=1, replicas=tuple(Replica(devices=(name,), samples=(1,)) for name in devices))
        return Plan(graph="g", cluster="cluster", batch_size=len(devices), micro_batch_size=1, stages=(stage,))

    assert rules.why_not_borders(plan("oslo-0/0"), cluster) is None
    assert "mode lockstep does not check what its processes send" in (rules.why_not_borders(plan("oslo-0/0", "bern-0/0"), cluster) or "")
    unbound = parse_cluster(CLUSTER.replace("may_send", "# may_send"))
    assert rules.why_not_borders(plan("oslo-0/0", "bern-0/0"), unbound) is None


# ---- at the socket


def _content(message: Named) -> Content:
    kind, _, name = message.name.partition(":")
    return Content(kind, name, "none")


class Exchange:
    """Methods that carry tensors of declared kinds, and one that says nothing."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    @allowed("worker")
    @carries(request=_content, reply=_content)
    async def give(self, request: Named, peer: CallingPeer) -> Named:
        self.seen.append(request.name)
        return Named("updates:back", request.tensors)

    @carries(request=_content, reply="logits")
    async def answer(self, request: Named, peer: CallingPeer) -> Named:
        self.seen.append(request.name)
        return Named("logits:answer", [PATTERN + 1])

    @carries(reply=_content)
    async def replies(self, request: Named, peer: CallingPeer) -> AsyncIterator[Named]:
        yield Named("updates:first", [PATTERN])
        yield Named(request.name, [PATTERN + 1])

    @carries(request=_content)
    async def take(self, requests: AsyncIterator[Named], peer: CallingPeer) -> int:
        return sum([len(request.tensors) async for request in requests])

    async def undeclared(self, request: Named, peer: CallingPeer) -> int:
        self.seen.append("undeclared")
        return len(request.tensors)


PATTERN = torch.full((40_000,), 0x5EC12E75, dtype=torch.int32)
"""Its bytes appear nowhere by chance; PATTERN + 1 is another one, of the forbidden."""


class Tap:
    """A socket in between that keeps all bytes that pass, in both directions."""

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._target = (host, int(port))
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.seen = bytearray()
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        near, _ = self._server.accept()
        far = socket.create_connection(self._target)
        self._ends += [near, far]
        for one, other in ((near, far), (far, near)):
            self._threads.append(threading.Thread(target=self._forward, args=(one, other), daemon=True))
            self._threads[-1].start()

    def _forward(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(1 << 16):
                self.seen += data
                other.sendall(data)
        except OSError:
            pass

    def close(self) -> None:
        self._server.close()
        for end in self._ends:
            end.close()

    def saw(self, tensor: torch.Tensor) -> bool:
        return tensor[:4].numpy().tobytes() in self.seen


class Wired:
    """rome calls oslo over TCP with a tap between; each has its guard and its log."""

    def __init__(self, directory: Path, rome_guarded: bool = True, oslo_guarded: bool = True) -> None:
        rules = BorderRules({"rome": ("updates",), "oslo": ("updates", "ids")})
        self.directory = directory
        self.logs = {name: AuditLog(directory, name) for name in ("rome", "oslo")}
        site = {"rome": "rome", "oslo": "oslo"}.get
        guards = {name: SiteBorder(rules, name, site, self.logs[name]) for name in ("rome", "oslo")}
        self.service = Exchange()
        self.events: list[AnyEvent] = []
        self.oslo = Fabric("oslo", services=[self.service], border=guards["oslo"] if oslo_guarded else None, observer=self.events.append)
        self.tap = Tap(self.oslo.listen())
        self.rome = Fabric("rome", border=guards["rome"] if rome_guarded else None, observer=self.events.append)
        self.remote: Remote = self.rome.connect(self.tap.address)

    def close(self) -> None:
        self.rome.close()
        self.oslo.close()
        self.tap.close()
        for log in self.logs.values():
            log.close()

    def crossed(self, name: str) -> list[tuple[str, str, str, str]]:
        found = check_log(self.directory, name)
        assert not found.problems
        return [(record.direction, record.kind, record.name, "refused" if record.refused else "") for record in found.records]

    def records(self, name: str) -> tuple[AuditRecord, ...]:
        return check_log(self.directory, name).records


@pytest.fixture
def wired(tmp_path: Path) -> Iterator[Wired]:
    pair = Wired(tmp_path)
    yield pair
    pair.close()


def test_what_may_leave_passes_and_is_logged_at_both_ends(wired: Wired) -> None:
    reply = wired.remote.call_sync(Exchange.give, Named("updates:u.1", [PATTERN]))
    assert torch.equal(reply.tensors[0], PATTERN)
    assert wired.tap.saw(PATTERN)  # so the tap would see another one too
    assert wired.crossed("rome") == [("out", "updates", "u.1", ""), ("in", "updates", "back", "")]
    assert wired.crossed("oslo") == [("in", "updates", "u.1", ""), ("out", "updates", "back", "")]
    sent, received = wired.records("rome")[0], wired.records("oslo")[0]
    assert sent.tensors == received.tensors == (("int32", (40_000,)),)
    assert sent.bytes == received.bytes > 160_000
    assert (sent.peer, received.peer, received.peer_site) == ("oslo", "rome", "rome")


def test_a_forbidden_request_never_reaches_the_socket(wired: Wired) -> None:
    with pytest.raises(RefusedError, match=r"site 'rome' may send only updates .* and this is logits"):
        wired.remote.call_sync(Exchange.give, Named("logits:l.7", [PATTERN + 1]))
    with pytest.raises(RefusedError, match="nothing declares what this is"):
        wired.remote.call_sync(Exchange.undeclared, Named("", [PATTERN + 1]))
    with pytest.raises(RefusedError, match="nothing declares what this is"):
        wired.remote.call_sync(Exchange.undeclared, Named("x" * 70_000))
    assert wired.remote.call_sync(Exchange.give, Named("updates:u.1", [PATTERN])).name == "updates:back"
    assert wired.tap.saw(PATTERN)
    assert not wired.tap.saw(PATTERN + 1)
    assert b"xxxxxxxx" not in wired.tap.seen
    assert wired.service.seen == ["updates:u.1"]
    assert [what for *_, what in wired.crossed("rome")] == ["refused", "refused", "refused", "", ""]
    assert wired.crossed("rome")[0] == ("out", "logits", "l.7", "refused")
    told = [event for event in wired.events if isinstance(event, PeerRefused)]
    assert [event.peer for event in told] == ["oslo"] * 3
    assert "l.7 to oslo: site 'rome' may send only updates" in told[0].reason


def test_talk_without_tensors_needs_no_declaration(wired: Wired) -> None:
    assert wired.remote.call_sync(Exchange.undeclared, Named("hello")) == 0
    assert wired.crossed("rome") == []


def test_a_forbidden_reply_never_reaches_the_socket(wired: Wired) -> None:
    with pytest.raises(RefusedError, match=r"oslo refused the call: .*site 'oslo' may send only updates, ids"):
        wired.remote.call_sync(Exchange.answer, Named("updates:u.1", [PATTERN]))
    wired.remote.call_sync(Exchange.give, Named("updates:u.2", [PATTERN]))  # behind whatever was sent before
    assert wired.tap.saw(PATTERN)
    assert not wired.tap.saw(PATTERN + 1)
    assert wired.crossed("oslo")[1] == ("out", "logits", "Exchange.answer", "refused")


def test_forbidden_items_of_streams_never_reach_the_socket(wired: Wired) -> None:
    async def requests() -> AsyncIterator[Named]:
        yield Named("updates:a", [PATTERN])
        yield Named("features:b", [PATTERN + 1])

    async def read_all() -> None:
        async for reply in wired.remote.stream(Exchange.replies, Named("states:c")):  # a failure may pass what is unread
            assert reply.name == "updates:first"

    async def both() -> None:
        with pytest.raises(RefusedError, match="site 'rome' may send only updates"):
            await wired.remote.call(Exchange.take, requests())
        with pytest.raises(RefusedError, match="may send only updates, ids"):
            await read_all()

    wired.rome.run(both())
    wired.remote.call_sync(Exchange.give, Named("updates:u.2", [PATTERN]))
    assert wired.tap.saw(PATTERN)
    assert not wired.tap.saw(PATTERN + 1)


def test_who_sends_without_asking_is_refused_at_the_other_end(tmp_path: Path) -> None:
    """A site whose own guard is not there: the tensor crosses, but nobody takes it, and whose it was is told and logged."""
    wired = Wired(tmp_path, rome_guarded=False)
    try:
        with pytest.raises(RefusedError, match=r"l\.7 from rome: site 'rome' may send only updates"):
            wired.remote.call_sync(Exchange.give, Named("logits:l.7", [PATTERN]))
        assert wired.service.seen == []
        assert wired.crossed("oslo") == [("in", "logits", "l.7", "refused")]

        async def requests() -> AsyncIterator[Named]:
            yield Named("features:f", [PATTERN])

        with pytest.raises(RefusedError, match="f from rome: site 'rome' may send only updates"):
            wired.rome.run(wired.remote.call(Exchange.take, requests()))
        assert any(isinstance(event, PeerRefused) and event.peer == "rome" for event in wired.events)
    finally:
        wired.close()
    wired = Wired(tmp_path / "replies", oslo_guarded=False)
    try:
        with pytest.raises(RefusedError, match=r"Exchange.answer from oslo: site 'oslo' may send only updates, ids"):
            wired.remote.call_sync(Exchange.answer, Named("updates:u.1", [PATTERN]))
    finally:
        wired.close()


def test_where_the_log_cannot_be_written_nothing_leaves(wired: Wired) -> None:
    assert wired.remote.call_sync(Exchange.give, Named("updates:u.1")).name == "updates:back"
    wired.logs["rome"].close()
    with pytest.raises(RefusedError, match="must be logged first, and cannot be"):
        wired.remote.call_sync(Exchange.give, Named("updates:u.2", [PATTERN]))
    assert not wired.tap.saw(PATTERN)


def test_the_codec_of_an_encoded_tensor_is_logged_and_declarations_are_checked() -> None:
    from atoll.fabric.service import content_of

    class Part:
        header: Header = make_codec("int8").encode(torch.zeros(600)).header

    assert content_of("updates", "S.m", Part()) == Content("updates", "S.m", "int8")
    assert content_of(None, "S.m", Part()) is None
    with pytest.raises(RefusedError, match=r"S\.m: what a message carries cannot be told: ZeroDivisionError"):
        content_of(lambda value: Content(str(1 // 0)), "S.m", 3)
    with pytest.raises(FabricError, match="nothing is called 'update'"):
        carries(request="update")


def test_peers_of_the_same_site_are_neither_asked_nor_logged(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, "a")
    guard = SiteBorder(BorderRules({"rome": ()}), "rome", lambda peer: "rome", log)
    with Fabric("a", border=guard) as a, Fabric("b", services=[Exchange()]) as b:
        assert a.connect(b.listen()).call_sync(Exchange.undeclared, Named("", [PATTERN])) == 1
    log.close()
    assert not check_log(tmp_path, "a").records


class Members:
    """A hub that relays, and two members that reach each other only through it, each at a site of its own."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        authority = Authority.create(directory / "authority")
        rules = BorderRules({"oslo": ("updates",), "rome": ("updates",), "hub": ()})
        self.logs = {name: AuditLog(directory, name) for name in ("oslo", "rome", "coordinator")}
        sites = {"oslo": "oslo", "rome": "rome", "coordinator": "hub"}
        guards = {name: SiteBorder(rules, sites[name], sites.get, log) for name, log in self.logs.items()}
        self.service = Exchange()
        hub, address = serve(authority, "127.0.0.1:0", border=guards["coordinator"])
        stack.enter_context(hub)
        rome = stack.enter_context(RunMember(authority.credentials("rome", "worker"), services=[self.service], border=guards["rome"]))
        oslo = stack.enter_context(RunMember(authority.credentials("oslo", "worker"), border=guards["oslo"]))
        rome.fabric.run(rome.join(address).connected())
        self.rome = oslo.reach("rome", oslo.join(address))


def test_members_keep_borders_through_a_relay_that_may_send_nothing_itself(tmp_path: Path) -> None:
    """What is relayed is checked and logged at the two ends of the connection; whoever relays it can read none of it."""
    with ExitStack() as stack:
        members = Members(tmp_path, stack)
        reply = members.rome.call_sync(Exchange.give, Named("updates:u.1", [PATTERN]), timeout_seconds=60)
        assert torch.equal(reply.tensors[0], PATTERN)
        with pytest.raises(RefusedError, match="site 'oslo' may send only updates"):
            members.rome.call_sync(Exchange.give, Named("logits:l.7", [PATTERN]))
        assert members.service.seen == ["updates:u.1"]
    for log in members.logs.values():
        log.close()
    found = {name: check_log(tmp_path, name).records for name in members.logs}
    assert [(one.direction, one.peer, one.kind, bool(one.refused)) for one in found["oslo"]] == [
        ("out", "rome", "updates", False),
        ("in", "rome", "updates", False),
        ("out", "rome", "logits", True),
    ]
    assert [one.direction for one in found["rome"]] == ["in", "out"]
    assert found["coordinator"] == ()
