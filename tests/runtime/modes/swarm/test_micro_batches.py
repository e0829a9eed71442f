"""No message ends a worker: tensors that its stage cannot take are refused where they arrive, and what fails then is passed over."""

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from atoll.control.messages import Attempt, Backward, Forward, Message
from atoll.control.settings import Settings
from atoll.errors import RefusedError
from atoll.events import AnyEvent, StepFinished
from atoll.fabric.payload import decode_payload, encode_payload
from atoll.graph.capture import capture_program
from atoll.runtime.activations import activations_of
from atoll.runtime.modes.swarm.compute import programs_of
from atoll.runtime.modes.swarm.micro_batches import TensorChecks
from atoll.runtime.modes.swarm.transport import AnyMessage, Letter, SwarmService

from .one_process import OneProcess
from .test_compute import BOUNDS, job, plain

ATTEMPT = Attempt((1, 1), "feeder", 1, 0)
SAMPLES = 4
X, Y = torch.zeros(SAMPLES, 6), torch.zeros(SAMPLES, dtype=torch.int64)
HIDDEN = torch.zeros(SAMPLES, 16)


@pytest.fixture(scope="module")
def checks() -> TensorChecks:
    captured = capture_program(job())
    return TensorChecks(captured, programs_of(captured, BOUNDS), [(0, SAMPLES), (SAMPLES, 2 * SAMPLES), (2 * SAMPLES, 2 * SAMPLES + 1)])


def forward(stage: int, binding: Any, leaves: Any, values: Any) -> Forward:
    return Forward(0, 0, stage, 0, ATTEMPT, ("a", "b", "c"), frozenset(), [binding, leaves, values])


def backward(payload: Any) -> Backward:
    return Backward(0, 0, 0, 0, ATTEMPT, payload)


def arrived(message: Message) -> Any:
    """As it is after its journey."""
    payload = encode_payload(message)
    return decode_payload(payload.data, [tensor.clone() for tensor in payload.tensors], AnyMessage)


def leaves(checks: TensorChecks, stage: int) -> dict[str, Tensor]:
    """The inputs have one more dimension than the labels, which later stages read."""
    shapes = {name: checks._sizes.leaf_shape(name, (SAMPLES,)) for name in checks._leaves[stage]}
    return {name: X if shape == X.shape else Y for name, shape in shapes.items()}


def test_tensors_of_an_ordinary_micro_batch_fit(checks: TensorChecks) -> None:
    assert checks.why_unfit(arrived(forward(0, [SAMPLES], leaves(checks, 0), []))) is None
    assert checks.why_unfit(arrived(forward(1, [SAMPLES], leaves(checks, 1), [HIDDEN]))) is None
    assert checks.why_unfit(arrived(backward([HIDDEN]))) is None


@pytest.mark.parametrize(
    "payload",
    [None, [], 3, "abc", [HIDDEN, HIDDEN], [HIDDEN.double()], [HIDDEN.T], [HIDDEN[0]], [torch.zeros(SAMPLES, 17)], ["x"], [None]],
)
def test_other_tensors_than_a_stage_takes_do_not(checks: TensorChecks, payload: Any) -> None:
    own = leaves(checks, 1)
    assert checks.why_unfit(arrived(forward(1, [SAMPLES], own, payload)))
    assert checks.why_unfit(arrived(backward(payload)))


@pytest.mark.parametrize("binding", [None, [], [0], [-4], [2.5], ["4"], [SAMPLES + 1], [SAMPLES, SAMPLES], [2**40]])
def test_sizes_that_are_not_those_of_the_tensors_do_not_fit(checks: TensorChecks, binding: Any) -> None:
    assert checks.why_unfit(arrived(forward(1, binding, leaves(checks, 1), [HIDDEN])))


def test_another_part_of_the_batch_does_not_fit(checks: TensorChecks) -> None:
    own = leaves(checks, 1)
    for wrong in (None, [], {}, {**own, "more": X}, dict.fromkeys(own, X), dict.fromkeys(own, 5)):
        assert checks.why_unfit(arrived(forward(1, [SAMPLES], wrong, [HIDDEN])))
    assert checks.why_unfit(msgspec.structs.replace(forward(1, [], {}, []), payload=7))


def test_other_dtypes_of_the_batch_do_not_fit(checks: TensorChecks) -> None:
    own = leaves(checks, 1)
    wrong = {name: leaf.double() if leaf.is_floating_point() else leaf.int() for name, leaf in own.items()}
    for name in own:
        why = checks.why_unfit(arrived(forward(1, [SAMPLES], {**own, name: wrong[name]}, [HIDDEN])))
        assert why == f"{name!r} is no tensor of {own[name].dtype} and shape {list(own[name].shape)}"


def test_another_number_of_samples_than_the_micro_batch_has_does_not_fit(checks: TensorChecks) -> None:
    """Though all tensors of the message agree about it."""
    fewer = {name: leaf[:-1] for name, leaf in leaves(checks, 1).items()}
    short = arrived(forward(1, [SAMPLES - 1], fewer, [HIDDEN[:-1]]))
    assert checks.why_unfit(short) == f"its micro-batch has {SAMPLES} samples, and it another number"
    assert checks.why_unfit(arrived(backward([HIDDEN[:-1]])))
    one = {name: leaf[:1] for name, leaf in leaves(checks, 1).items()}
    assert checks.why_unfit(msgspec.structs.replace(arrived(forward(1, [1], one, [HIDDEN[:1]])), micro_batch=2)) is None
    assert checks.why_unfit(msgspec.structs.replace(arrived(backward([HIDDEN[:1]])), micro_batch=2)) is None


def test_what_does_not_fit_is_refused_and_its_sender_named(checks: TensorChecks) -> None:
    @dataclass
    class Peer:
        name: str = "mallory"
        role: str = "worker"

    taken: list[Message] = []
    settings = Settings(stages=3, micro_batches=3, steps=1)
    service = SwarmService(lambda to, message: taken.append(message), settings, checks.why_unfit)
    asyncio.run(service.deliver(Letter("a", backward([HIDDEN])), Peer()))  # type: ignore[arg-type]
    with pytest.raises(RefusedError, match=r"mallory sent a Backward that cannot be meant: .* has the shape \[16, 4\]"):
        asyncio.run(service.deliver(Letter("a", backward([HIDDEN.T])), Peer()))  # type: ignore[arg-type]
    assert len(taken) == 1


@pytest.mark.parametrize(("kind", "stage"), [(Forward, 0), (Forward, 1), (Forward, 2), (Backward, 0), (Backward, 1)])
@pytest.mark.parametrize("wrong", [[], [torch.zeros(SAMPLES, 17)]])
def test_a_kernel_that_fails_costs_its_micro_batch_and_not_the_worker(kind: type, stage: int, wrong: list[Tensor]) -> None:
    """Wrong tensors that nobody refused, in the place of one true message: the run ends with the weights of an undisturbed one."""
    swarm = OneProcess(job(), BOUNDS, 4, SAMPLES, patience_seconds=0.2)
    send, spoilt = swarm.send, list[Message]()

    def deliver(to: str, message: Any) -> None:
        if spoilt or type(message) is not kind or message.stage != stage or to not in swarm.inboxes:
            send(to, message)
            return
        spoilt.append(message)
        if kind is Backward:
            payload: Any = wrong
        else:
            true = activations_of(message.payload)
            payload = [true.binding, true.leaves if stage else {}, wrong]
        swarm.inboxes[to].put(msgspec.structs.replace(message, payload=payload))

    swarm.send = deliver  # type: ignore[method-assign]
    asyncio.run(swarm.run())
    assert len(spoilt) == len(swarm.warned) == 1
    who = "feeder" if kind is Forward and not stage else "worker-"
    assert f"at stage {stage}: the {kind.__name__} that {who}" in swarm.warned[0]
    expected = plain(job())[1]
    for worker in swarm.workers.values():
        for name, parameter in worker.state.module.parameters_by_name().items():
            torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-5, atol=1e-6)


def test_a_job_that_cannot_be_computed_ends_the_worker() -> None:
    """Not at the first failure, which may be somebody's message, but soon."""
    swarm = OneProcess(job(), BOUNDS, 4, SAMPLES, patience_seconds=0.2)

    async def fail(*what: Any) -> Any:
        raise RuntimeError("not enough memory")

    def spoil(swarm: OneProcess, event: AnyEvent) -> None:
        if isinstance(event, StepFinished) and event.step == 2:
            for compute in swarm.computes.values():
                compute.turn = fail  # type: ignore[method-assign]

    with pytest.raises(RuntimeError, match="not enough memory"):
        asyncio.run(swarm.run(spoil))
    assert 2 <= len(swarm.warned) <= 2 * len(swarm.workers)
