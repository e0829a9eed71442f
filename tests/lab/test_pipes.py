"""What the forwarder does to packets, without any packets."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from atoll.lab.network import ForwarderState, Pipe, Pipes, PipeState, wire_bytes

PIPES = tuple(PipeState(i, j, 1000.0 if i != j else None, 0.5, 0.0) for i in range(2) for j in range(2))
OSLO, NEIGHBOUR, ROME = bytes([10, 1, 0, 2]), bytes([10, 1, 0, 3]), bytes([10, 2, 0, 2])


@given(st.lists(st.tuples(st.floats(0, 0.2), st.integers(40, 65536)), min_size=1, max_size=60), st.floats(1e5, 1e8), st.floats(0, 0.2))
def test_packets_keep_their_order_and_never_pass_faster_than_the_bandwidth(
    packets: list[tuple[float, int]], bytes_per_s: float, latency: float
) -> None:
    pipe, now, through = Pipe(PipeState(0, 1, bytes_per_s, latency, 0.0)), 0.0, []
    for pause, size in packets:
        now += pause
        due = pipe.leaves_at(now, size)
        if due is not None:
            assert due >= now + latency + 0.999 * size / bytes_per_s
            through.append((due, size))
    for (before, _), (due, size) in itertools.pairwise(through):
        assert due - before >= 0.999 * size / bytes_per_s - 1e-9


def test_a_full_queue_drops_and_takes_packets_again_later() -> None:
    pipe = Pipe(PipeState(0, 1, 1e6, 0.1, 0.0))
    taken = sum(pipe.leaves_at(0.0, 10_000) is not None for _ in range(100))
    assert 25 <= taken <= 28  # 256 KiB, of a line that holds a round trip and 50 ms of 1 MB/s
    assert pipe.leaves_at(1.0, 10_000) is not None


def test_other_bandwidths_hold_from_the_next_packet_on() -> None:
    pipe = Pipe(PipeState(0, 1, 1000.0, 0.0, 0.0))
    assert pipe.leaves_at(0.0, 100) == 0.1
    pipe.state = PipeState(0, 1, 100.0, 0.0, 0.0)
    assert pipe.leaves_at(0.0, 100) == 1.1


def test_cuts_are_of_one_direction_and_of_hosts_or_sites() -> None:
    blocked = Pipes(ForwarderState(PIPES, blocked=(("10.1.0.2", "10.2."),)), lambda: 0.0)
    assert blocked.leaves_at(0.0, OSLO, ROME, 100) is None
    assert blocked.leaves_at(0.0, ROME, OSLO, 100) is not None
    assert blocked.leaves_at(0.0, NEIGHBOUR, ROME, 100) is not None
    blocked.change(ForwarderState(PIPES))
    assert blocked.leaves_at(0.0, OSLO, ROME, 100) is not None


def test_losses_of_a_link_and_of_both_ends_are_drawn_one_by_one() -> None:
    chances = iter([0.5, 0.5, 0.05])
    state = ForwarderState(
        tuple(PipeState(i, j, None, 0.0, 0.1) for i in range(2) for j in range(2)), lossy={"10.1.0.2": 0.1, "10.2.0.2": 0.1}
    )
    assert state.loses
    assert Pipes(state, lambda: next(chances)).leaves_at(0.0, OSLO, ROME, 100) is None
    assert Pipes(state, lambda: 0.5).leaves_at(0.0, OSLO, ROME, 100) == 0.0
    assert not ForwarderState(PIPES).loses


def test_addresses_outside_the_lab_lead_nowhere() -> None:
    assert Pipes(ForwarderState(PIPES), lambda: 0.0).leaves_at(0.0, OSLO, bytes([8, 8, 8, 8]), 100) is None


@given(st.integers(1, 64_000), st.integers(1, 1448), st.integers(20, 100))
def test_a_bundle_weighs_what_its_segments_would(payload: int, segment: int, header: int) -> None:
    one_by_one = sum(header + min(segment, payload - start) for start in range(0, payload, segment))
    assert wire_bytes(header + payload, segment, header) == one_by_one
