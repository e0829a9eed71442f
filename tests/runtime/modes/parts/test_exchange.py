"""What parts send: kept until all receivers have it, made on demand, never more than the credits ahead; and what the run makes of it."""

import asyncio
import math

import pytest
import torch

from atoll.codec.base import Header
from atoll.errors import RefusedError
from atoll.events import CheckpointSaved, Evaluated, RunFinished, StepFinished, Warned
from atoll.runtime.modes.parts.exchange import Outbox, Thing
from atoll.runtime.modes.parts.messages import Missed, PartStep, SentTensor, Use, Wanted, opened, sent_tensor
from atoll.runtime.modes.parts.run_events import RunEvents

IDS = Thing("ids")
NOW = 0.0


def wanted(step: int, taken: int = 0) -> Wanted:
    return Wanted(name="ids", step=step, taken=taken)


def value(number: int) -> SentTensor:
    return sent_tensor(torch.tensor([number]), "none")


def test_a_sender_waits_for_the_slowest_receiver_and_keeps_what_it_lacks() -> None:
    async def act() -> None:
        outbox = Outbox({IDS: ["first", "second"]}, most=2)
        await outbox.begin(10)
        for step in (11, 12):
            await outbox.room(step)
            await outbox.put(step, {IDS: value(step)})
        waiting = asyncio.ensure_future(outbox.room(13))
        await outbox.get(wanted(12, taken=11), "first", NOW)
        assert not waiting.done()
        found = await outbox.get(wanted(11, taken=10), "second", NOW)  # though the first has it
        assert int(opened("ids", found, "none")) == 11
        await outbox.get(wanted(12, taken=11), "second", NOW)
        await waiting
        assert (await outbox.get(wanted(11, taken=11), "first", NOW)).header is None  # all have had it
        assert (await outbox.get(wanted(14), "first", NOW)).header is None  # not yet
        with pytest.raises(RefusedError, match="third does not receive 'ids' from here"):
            await outbox.get(wanted(12), "third", NOW)

    asyncio.run(act())


def test_on_demand_values_are_made_for_who_waits_and_made_again() -> None:
    async def act() -> None:
        outbox = Outbox({IDS: ["student"]}, most=2, on_demand=True)
        assert await outbox.wanted(NOW) is None
        waiting = [asyncio.ensure_future(outbox.get(wanted(step), "student", 60.0)) for step in (5, 4)]
        given_up = asyncio.ensure_future(outbox.get(wanted(1), "student", 60.0))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.wait([given_up])
        for step in (4, 5):
            assert await outbox.wanted(60.0) == step
            await outbox.put(step, {IDS: value(step)})
        assert [int(opened("ids", await one, "none")) for one in waiting] == [5, 4]
        await outbox.put(6, {IDS: value(6)})
        again = asyncio.ensure_future(outbox.get(wanted(4), "student", 60.0))  # it was made first, and is not kept
        assert await outbox.wanted(60.0) == 4
        await outbox.put(4, {IDS: value(4)})
        assert int(opened("ids", await again, "none")) == 4

    asyncio.run(act())


def test_what_arrives_is_what_was_declared() -> None:
    given = torch.randn(8, 300)
    assert torch.equal(opened("x", sent_tensor(given, "none"), "bf16"), given)  # it may always travel exactly
    assert torch.allclose(opened("x", sent_tensor(given, "bf16"), "bf16"), given, rtol=0.01)
    with pytest.raises(RefusedError, match="'x' arrived and cannot be meant: it is sent as 'bf16'"):
        opened("x", sent_tensor(given, "bf16"), "none")
    with pytest.raises(RefusedError, match="other sizes than it says"):
        opened("x", SentTensor(header=Header(codec="none", dtype="float32", shape=(3,)), parts=(torch.zeros(2),)), "none")
    with pytest.raises(RefusedError, match="cannot be meant"):
        opened("x", SentTensor(header=Header(codec="none", dtype="float32", shape=(1 << 20, 1 << 20)), parts=(torch.zeros(2),)), "none")


def step(number: int, loss: float | None, norm: float | None = None) -> PartStep:
    return PartStep(step=number, loss=loss, weight=8.0, seconds=number * 1.0, waited_seconds=0.5, learning_rate=0.1, gradient_norm=norm)


def test_a_step_of_the_run_is_one_that_all_parts_have_made() -> None:
    run = RunEvents(["a", "b"], ["b"], batch_size=8, directory="run/parts")
    run.begin(0)
    saved = CheckpointSaved(step=1, path="a", size_bytes=10, blocked_seconds=0.1, seconds=0.2)
    evaluated = Evaluated(step=1, loss=2.0, metrics={"accuracy": 0.5}, samples=3, seconds=0.1)
    assert run.add("b", step(1, None, 3.0)) == []
    assert run.add("b", evaluated) == []  # before all have made the step
    assert run.add("b", saved) == []
    made, told = run.add("a", step(1, 1.5, 4.0))
    assert isinstance(made, StepFinished)
    assert (made.step, made.loss, made.losses, made.gradient_norm) == (1, 1.5, {"a": 1.5}, 5.0)
    assert isinstance(told, Evaluated)
    assert (told.loss, told.metrics) == (2.0, {"b.accuracy": 0.5})
    (whole,) = run.add("a", saved)
    assert isinstance(whole, CheckpointSaved)
    assert (whole.path, whole.size_bytes) == ("run/parts", 20)
    assert run.ending() is None
    for name, reason in (("a", "done"), ("b", "stopped")):
        run.add(name, RunFinished(reason=reason, steps=1, samples=8, seconds=1.0))  # type: ignore[arg-type]
    assert run.ending() == "stopped"


def test_what_crossed_is_counted_over_restarts() -> None:
    run = RunEvents(["a"], [], batch_size=8, directory="run/parts")
    use = Use(name="x", gradient=False, sender="b", receiver="a", messages=2, bytes=10, positions=4, missed=1, waited_seconds=0.5)
    run.add("a", use)
    run.begin(1)  # the part was started again
    run.add("a", use)
    run.add("a", use)  # the same account
    (edge,) = run.measured({"a": "here/0"}).edges
    assert (edge.steps, edge.bytes, edge.positions, edge.missed, edge.waited_seconds) == (4, 20, 8, 2, 1.0)
    assert edge.bytes_per_position == 2.5
    (warned,) = run.add("a", Missed(name="x", step=7))
    assert isinstance(warned, Warned)
    assert warned.message == "goes on without 'x' from step 7 on: its sender is away"
    assert math.isclose(run.totals["a"].seconds, 0.0)
