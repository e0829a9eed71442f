"""Each link has its codec: fixed, or chosen from what is measured, with the decisions as events."""

import torch

from atoll.events import AnyEvent, CodecChosen
from atoll.fabric import ShapedLink
from atoll.fabric.collective import FED_BACK_CODECS, AdaptiveCodecs, FixedCodecs, RoundMember, equal_network, make_plan
from atoll.fabric.deadline import LinkEstimate
from tests.fabric.collective.peers import party


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def estimate(bytes_per_s: float) -> LinkEstimate:
    found = LinkEstimate()
    found.outgoing_bytes_per_s = bytes_per_s
    found.round_trip.add(0.02)
    return found


def test_a_link_that_gets_ten_times_slower_or_faster_changes_its_codec_within_seconds() -> None:
    events: list[AnyEvent] = []
    links = {"near": estimate(2e9), "far": estimate(2e9)}
    clock = Clock()
    codecs = AdaptiveCodecs(links.get, clock, events.append, nbytes=1e8)

    def after(seconds: float) -> str:
        end = clock.now + seconds
        while clock.now < end:
            clock.now += 0.1
            codecs.towards("far")
        return codecs.towards("far").text

    fast = after(2.0)
    links["far"].outgoing_bytes_per_s = 2e7
    slow = after(2.0)
    assert slow != fast
    links["far"].outgoing_bytes_per_s = 2e9
    assert after(2.0) == fast
    assert codecs.towards("near").text == fast
    decided = [event for event in events if isinstance(event, CodecChosen)]
    assert [(event.link, event.codec, event.before) for event in decided] == [
        ("far", fast, ""), ("far", slow, fast), ("far", fast, slow), ("near", fast, "")
    ]  # fmt: skip
    assert all(event.reason for event in decided)


def test_results_go_by_the_slowest_link_and_unmeasured_ones_start_with_int8() -> None:
    links = {"near": estimate(5e9), "far": estimate(1e6)}
    clock = Clock()
    codecs = AdaptiveCodecs(links.get, clock, nbytes=1e8)
    assert codecs.towards("unknown").text == "int8"
    for _ in range(5):
        clock.now += 1.0
        together = codecs.for_all(["near", "far"]).text
        alone = codecs.towards("far").text
    assert together == alone == "int4"


def test_codecs_say_what_they_need() -> None:
    assert FixedCodecs("top-k:0.01").needs_feedback
    assert not FixedCodecs("int4").needs_feedback
    assert AdaptiveCodecs({}.get, Clock(), codecs=FED_BACK_CODECS, error_budget=1.0).needs_feedback
    assert not AdaptiveCodecs({}.get, Clock()).needs_feedback


def test_a_running_collective_adapts_and_says_so() -> None:
    """Chunks say how they are encoded: links with different codecs work together, and all still hold the same result."""
    names = ("a", "b", "c")
    with party(names, link=ShapedLink(2e6, 0.001), adaptive=True) as peers:
        buffers = {name: torch.randn(200_000) for name in names}
        exact = sum(buffers.values(), torch.zeros(200_000))
        for number in range(2):
            plan = make_plan(f"r{number}", 200_000, [RoundMember(name=name) for name in names], equal_network(names), chunk_elements=8192)
            futures = [peers.collectives[name].reduce_soon(plan, buffers[name]) for name in names]
            results = [future.result(120) for future in futures]
            assert len({result.digest for result in results}) == 1
            assert float((results[0].require_complete() - exact).norm() / exact.norm()) < 0.3
        chosen = [event for events in peers.events.values() for event in events if isinstance(event, CodecChosen)]
        assert chosen, "something was measured and decided"
