"""Codecs on the way of activations and their gradients: over real sockets what arrives is what was sent, nearly, in fewer bytes."""

import asyncio
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.codec.registry import make_codec, relative_error
from atoll.control.messages import Attempt, Backward, Forward, Message, StateChunk
from atoll.control.settings import Settings
from atoll.errors import RefusedError
from atoll.events import AnyEvent, CodecChosen
from atoll.fabric.deadline import LinkEstimate
from atoll.fabric.security import Authority, RunMember, serve
from atoll.runtime.activations import Activations
from atoll.runtime.modes.swarm.compression import (
    AdaptiveCompression,
    FixedCompression,
    PlannedCompression,
    compressed,
    compressed_bytes,
    decompressed,
    is_compressed,
)
from atoll.runtime.modes.swarm.transport import Directory, FabricTransport, PeerAddress, SwarmService

ATTEMPT = Attempt((1, 1), "feeder", 1, 1)


SETTINGS = Settings(stages=2, micro_batches=8, steps=1)


def forward(*values: torch.Tensor, leaves: dict[str, object] | None = None) -> Forward:
    return Forward(0, 3, 1, 2, ATTEMPT, ("a", "b"), frozenset({0}), Activations((4,), leaves or {}, list(values)))


def backward(*values: torch.Tensor) -> Backward:
    return Backward(0, 3, 1, 2, ATTEMPT, list(values))


def values_of(message: Message) -> list[torch.Tensor]:
    assert isinstance(message, Forward | Backward)
    return list(message.payload.values if isinstance(message, Forward) else message.payload)


@given(st.sampled_from(["bf16", "fp16", "int8", "int4"]), st.lists(st.integers(0, 3000), max_size=3), st.booleans(), st.integers(0, 99))
def test_what_is_decoded_is_what_was_coded(name: str, sizes: list[int], ahead: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    floats = [torch.randn(size, generator=generator) for size in sizes]
    exact = [torch.arange(5), torch.randn(3, generator=generator, dtype=torch.float64), torch.zeros(2, 0)]
    message = forward(*floats, *exact, leaves={"mask": floats[0] if floats else 1}) if ahead else backward(*floats, *exact)
    small = compressed(message, make_codec(name))
    assert is_compressed(small) == any(sizes)
    found = decompressed(small)
    assert type(found) is type(message)
    for before, after in zip(values_of(message), values_of(found), strict=True):
        assert before.shape == after.shape
        assert before.dtype == after.dtype
        if before.dtype != torch.float32:
            assert torch.equal(before, after)
        elif before.numel():
            assert relative_error(before, after) <= 0.3
    if isinstance(found, Forward) and isinstance(message, Forward):
        assert found.payload.leaves == message.payload.leaves
        assert found.payload.binding == (4,)


def test_states_and_sums_are_never_coded() -> None:
    assert compressed_bytes(StateChunk(0, 0, 3, 1, 0, torch.zeros(9))) == 0


@pytest.mark.parametrize(
    "value",
    [
        {"compressed": {"codec": "top-k", "dtype": "float32", "shape": [1 << 40], "kept": 1}, "parts": [torch.zeros(1)]},
        {"compressed": {"codec": "int8", "dtype": "float32", "shape": [1 << 40]}, "parts": [torch.zeros(1)]},
        {"compressed": {"codec": "int8", "dtype": "float32", "shape": [-1]}, "parts": []},
        {"compressed": {"codec": "rar", "dtype": "float32", "shape": [1]}, "parts": []},
        {"compressed": 5, "parts": 5},
        {"compressed": {"codec": "none", "dtype": "float32", "shape": [1]}, "parts": 5},
        {},
    ],
)
def test_nonsense_is_refused(value: object) -> None:
    with pytest.raises(RefusedError, match="a Backward whose tensors cannot be read"):
        decompressed(Backward(0, 3, 1, 2, ATTEMPT, [value]))
    with pytest.raises(RefusedError, match="a Forward whose tensors cannot be read"):
        decompressed(Forward(0, 3, 1, 2, ATTEMPT, (), frozenset(), [[], {}, [value]]))


def test_over_sockets_fewer_bytes_arrive(tmp_path: Path) -> None:
    """Two members under TLS: the receiver is told nothing beforehand."""
    arrived: list[Message] = []
    both = threading.Event()

    def take(to: str, message: Message) -> None:
        assert to == "rome"
        arrived.append(message)
        if len(arrived) == 2:
            both.set()

    authority = Authority.create(tmp_path)
    coordinator, _ = serve(authority, "127.0.0.1:0")
    places = Directory()
    receiver = RunMember(authority.credentials("rome", "worker"), services=[SwarmService(take, SETTINGS)])
    with coordinator, receiver, RunMember(authority.credentials("oslo", "worker")) as oslo:
        places._places["rome"] = PeerAddress(receiver.fabric.listen("127.0.0.1:0"))

        async def send() -> None:
            transport = FabricTransport(oslo, None, places, FixedCompression("int8"))
            transport.send("rome", forward(torch.randn(500, 1000), torch.arange(9)))
            transport.send("rome", backward(torch.randn(500, 1000)))
            assert await asyncio.to_thread(both.wait, 60.0)

        asyncio.run(send())
        (remote,) = (peer for name, peer in receiver.fabric.peers.items() if name == "oslo")
        assert 1_000_000 < remote.received_bytes < 1_100_000  # of four million
    kinds = {type(message) for message in arrived}
    assert kinds == {Forward, Backward}
    for message in arrived:
        assert values_of(message)[0].shape == (500, 1000)


def test_a_slow_link_is_given_a_codec_and_a_fast_one_is_not() -> None:
    events: list[AnyEvent] = []
    rates, now = {"near": 4e9, "far": 2.5e6}, [0.0]

    def estimate(name: str) -> LinkEstimate:
        found = LinkEstimate()
        found.outgoing_bytes_per_s = rates[name]
        return found

    coding = AdaptiveCompression(estimate, events.append, clock=lambda: now[0])

    def after_seconds(name: str, message: Message) -> str:
        for _ in range(5):
            now[0] += 1.0
            codec = coding.choose(name, message, 4_000_000)
        return "none" if codec is None else codec.name

    assert after_seconds("near", forward()) == after_seconds("near", backward()) == "none"
    ahead, back = after_seconds("far", forward()), after_seconds("far", backward())
    assert "none" not in (ahead, back)
    assert {event.link for event in events if isinstance(event, CodecChosen) and event.codec != "none"} == {"far"}
    rates["far"] = 4e9
    assert after_seconds("far", forward()) == "none", "it recovers"


def test_a_planned_codec_is_told_once_for_every_peer() -> None:
    events: list[AnyEvent] = []
    sites = ("oslo", "rome", "rome")
    planned = PlannedCompression("worker-0", sites, (("oslo", "rome", "int8"),), FixedCompression("none"), events.append)
    for to in ("worker-1", "worker-2", "worker-1", "anna"):
        planned.choose(to, backward(), 4)
    assert [(event.link, event.codec) for event in events if isinstance(event, CodecChosen)] == [("worker-1", "int8"), ("worker-2", "int8")]


def test_the_plans_workers_use_its_codecs_between_sites_and_others_what_the_option_says() -> None:
    def name(own: str, to: str, option: str = "none") -> str | None:
        planned = PlannedCompression(own, ("oslo", "oslo", "rome"), (("rome", "oslo", "int8"),), FixedCompression(option))
        chosen = planned.choose(to, backward(), 4)
        return None if chosen is None else chosen.name

    assert name("worker-0", "worker-2") == name("worker-2-r1", "worker-1-3") == "int8"
    assert name("worker-0", "worker-1") is None  # in one site
    assert name("worker-0", "anna") is name("anna", "worker-2") is name("feeder", "worker-2") is None
    assert name("worker-0", "worker-2", "bf16") == "int8"
    assert name("worker-0", "worker-1", "bf16") == name("worker-0", "anna", "bf16") == name("worker-0", "worker-7", "bf16") == "bf16"
