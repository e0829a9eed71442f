"""Links to peers, over real sockets on loopback."""

import errno
import socket
import struct
import threading
from contextlib import contextmanager, suppress

import pytest

from atoll.cluster import dump_cluster, make_cluster, make_site, parse_cluster
from atoll.cluster.peer import GREETING, PeerLink, listen, measure_peer, parse_address, serve_session
from atoll.cluster.probe import join_peers
from atoll.errors import ClusterError


def _described(name="other", kind="T4"):
    return dump_cluster(make_cluster(name, [make_site(name, kind=kind)]))


@contextmanager
def _serving(answer):
    """A server on a free port whose one session `answer(server)` handles; yields its address and what the session returned."""
    results = []
    with listen(0, "127.0.0.1") as server:
        thread = threading.Thread(target=lambda: results.append(answer(server)))
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}", results
        thread.join(20)
        assert not thread.is_alive()


def test_a_link_is_measured_both_ways():
    shares = []
    with _serving(lambda server: serve_session(server, _described())) as (address, results):
        link = measure_peer(address, shares.append)
    assert results[0].endswith(": done")
    assert link.address == address
    assert 0 < link.round_trip_s < 1
    assert link.there_bytes_per_s > 1e6
    assert link.back_bytes_per_s > 1e6
    assert link.bytes_per_s == min(link.there_bytes_per_s, link.back_bytes_per_s)
    assert link.description == _described()
    assert shares == sorted(shares)


def test_nobody_there():
    with listen(0, "127.0.0.1") as server:
        port = server.getsockname()[1]
    with pytest.raises(
        ClusterError, match=rf"--peer 127.0.0.1:{port}: connection refused; is `atoll probe --serve {port}` running there\?"
    ):
        measure_peer(f"127.0.0.1:{port}")
    with pytest.raises(ClusterError, match="there is no such host"):
        measure_peer("no-such-host.invalid:7777")


def _finish(connection):
    """Say that this was all, and wait until the other side has gone too; it may be gone already, by a reset."""
    with suppress(ConnectionError):
        try:
            connection.shutdown(socket.SHUT_WR)
        except OSError as error:  # shutting down what was reset is "not connected", which Python does not count as a ConnectionError
            if error.errno != errno.ENOTCONN:
                raise
            return
        while connection.recv(1 << 16):
            pass


def _say(*pieces):
    """A server that says something and closes."""

    def answer(server):
        connection, _ = server.accept()
        with connection:
            for piece in pieces:
                connection.sendall(piece)
            _finish(connection)

    return answer


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([b"HTTP/1.1 400 Bad Request\r\n\r\n"], "is not an atoll probe"),
        ([], "the other side closed the connection"),
        ([GREETING], "the other side closed the connection"),
        ([GREETING, struct.pack("!Q", 1 << 40)], "description is too long"),
        ([GREETING, struct.pack("!Q", 2), b"\xff\xff"], "is not text"),
        ([GREETING, struct.pack("!Q", 2), b"ok", b"GONG"], "answered something else than PONG"),
    ],
)
def test_what_is_not_a_probe_is_refused(pieces, message):
    with _serving(_say(*pieces)) as (address, _), pytest.raises(ClusterError, match=message):
        measure_peer(address)


@pytest.mark.parametrize(
    ("sent", "outcome"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "is not an atoll probe"),
        (GREETING + struct.pack("!4sQ", b"PUSH", 1 << 60), "too much"),
        (GREETING + struct.pack("!4sQ", b"WHAT", 0), "unknown"),
        (GREETING + b"PI", "the other side closed the connection"),
        (GREETING + struct.pack("!4sQ", b"PUSH", 100) + b"short", "the other side closed the connection"),
        (GREETING + struct.pack("!4sQ", b"QUIT", 0), "done"),
    ],
)
def test_a_clients_mistake_ends_its_session_only(sent, outcome):
    with (
        _serving(lambda server: serve_session(server, "")) as (address, results),
        socket.create_connection(parse_address(address)) as client,
    ):
        client.sendall(sent)
        _finish(client)
    assert outcome in results[0]


@pytest.mark.parametrize("text", ["", "host", "host:", ":7", "host:0", "host:70000", "host:-1", "host:7x", "host:७"])
def test_bad_addresses(text):
    with pytest.raises(ClusterError, match="must be HOST:PORT"):
        parse_address(text)


def test_good_addresses():
    assert parse_address("node7:7777") == ("node7", 7777)
    assert parse_address("[::1]:7777") == ("::1", 7777)


def test_a_taken_port_is_an_error():
    with (
        listen(0) as server,
        pytest.raises(ClusterError, match="cannot listen: Address already in use"),
    ):
        listen(server.getsockname()[1])


def _link(description, round_trip_s, bytes_per_s):
    return PeerLink("a:1", round_trip_s, bytes_per_s, bytes_per_s * 2, description)


def test_near_peers_join_the_site_and_far_ones_are_sites_of_their_own():
    here = parse_cluster(_described("here", "A10"))
    peers = [
        _link(_described("near"), 1e-4, 1e9),
        _link(_described("near"), 2e-4, 2e9),
        _link(_described("far"), 0.04, 5e6),
        _link(_described("farther"), 0.1, 1e6),
    ]
    cluster = join_peers(here, peers)
    assert [site.name for site in cluster.sites] == ["here", "far-0-site", "farther-0-site"]
    assert [host.name for host in cluster.sites[0].hosts] == ["here-0", "near-0", "near-0-2"]
    assert (cluster.sites[0].link.bytes_per_s, cluster.sites[0].link.latency_s) == (1e9, 1e-4)
    figures = {link.name: (link.bytes_per_s, link.latency_s) for link in cluster.links}
    assert figures["here–far-0-site"] == (5e6, 0.02)
    assert figures["far-0-site–farther-0-site"] == pytest.approx((1e6, 0.07))
    assert parse_cluster(dump_cluster(cluster)) == cluster


def test_kinds_measured_apart_are_told_apart():
    kind = '[[device_kind]]\nname = "cpu"\nmemory = "8 GB"\nmemory_bandwidth = "9 GB/s"\nflops = {{ fp32 = "{} GFLOPS" }}\n'
    site = '[[site]]\nname = "s"\n[[site.host]]\nname = "h"\ndevices = [{ kind = "cpu" }]\n'
    cluster = join_peers(parse_cluster(site + kind.format(90)), [_link(site + kind.format(80), 1e-4, 1e9)])
    assert {device.name: device.kind.name for device in cluster.devices} == {"h/0": "cpu", "h-2/0": "cpu (h-2)"}
    assert parse_cluster(dump_cluster(cluster)) == cluster


def test_a_peer_that_describes_itself_badly_is_named():
    with pytest.raises(ClusterError, match="--peer a:1: site: missing"):
        join_peers(parse_cluster(_described("here")), [_link("", 1e-4, 1e9)])
