"""Buckets of gradients: what goes into which, when they leave, and what comes back. The other rank is played by the test."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from atoll.errors import JobFailedError
from atoll.runtime.modes.lockstep.gradients import GradientGroup, Gradients
from atoll.runtime.modes.lockstep.recorder import Recorder
from atoll.runtime.stage.shard_spec import ShardSpec
from tests.process_group import fake_group

BOTH = (0, 1)


@pytest.fixture(scope="module", autouse=True)
def two_ranks() -> Iterator[None]:
    """This process is rank 0 of 2; collectives do nothing."""
    with fake_group(2):
        yield


class Others:
    """Rank 1: what it adds to each bucket, in the order they leave, and how many have left."""

    def __init__(self, adds: list[list[float]] | None = None) -> None:
        self.adds, self.left = adds, 0

    def all_reduce(self, buffer: Tensor, group: Any = None, async_op: bool = False) -> "Others":
        if self.adds is not None:
            buffer += torch.tensor(self.adds[self.left])
        self.left += 1
        return self

    def wait(self) -> None:
        """It is there already."""


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Others:
    played = Others()
    monkeypatch.setattr("atoll.runtime.modes.lockstep.gradients.dist.all_reduce", played.all_reduce)
    return played


def gradients_of(parameters: dict[str, nn.Parameter], *, bucket_bytes: int = 1 << 20, alone: frozenset[str] = frozenset()) -> Gradients:
    """Of whole parameters that both ranks hold, but for those `alone`."""
    parts = [
        GradientGroup(name=name, dim=None, ranks=(0,) if name in alone else BOTH, repeats=(1,) if name in alone else (1, 1), stages=(0,))
        for name in parameters
    ]
    holdings = {name: ShardSpec(name=name, shape=tuple(parameter.shape)) for name, parameter in parameters.items()}
    return Gradients(0, parts, parameters, holdings, Recorder(torch.device("cpu")), bucket_bytes=bucket_bytes)


def parameters_of(*shapes: tuple[int, ...]) -> dict[str, nn.Parameter]:
    return {f"p{index}": nn.Parameter(torch.zeros(shape)) for index, shape in enumerate(shapes)}


def test_a_sparse_gradient_is_refused_in_a_sentence(others: Others) -> None:
    parameters = parameters_of((3, 2))
    gradients = gradients_of(parameters)
    gradients.arm(list(parameters.values()))
    (parameter,) = parameters.values()
    parameter.grad = torch.eye(3, 2).to_sparse()
    with pytest.raises(JobFailedError, match=r"shape \[3, 2\] has a sparse gradient.*sparse=False"):
        gradients.finish()


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 200))
def test_buckets_hold_everything_once_and_are_full_when_they_close(sizes: list[int], bucket_bytes: int) -> None:
    gradients = gradients_of(parameters_of(*((size,) for size in sizes)), bucket_bytes=bucket_bytes)
    filled, expected = 0, []
    for size in reversed(sizes):  # backward reaches the last parameters first
        filled += 4 * size
        if filled >= bucket_bytes:
            expected.append(filled)
            filled = 0
    assert [bucket.bytes for bucket in gradients.buckets] == expected + [filled] * bool(filled)
    assert {bucket.ranks for bucket in gradients.buckets} == {BOTH}


def test_types_of_numbers_do_not_mix_and_what_one_rank_holds_does_not_travel() -> None:
    parameters = parameters_of((3,), (5,), (7,)) | {"half": nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))}
    gradients = gradients_of(parameters, alone=frozenset({"p1"}))
    assert sorted(bucket.bytes for bucket in gradients.buckets) == [8, 40]


def test_a_bucket_leaves_when_its_last_gradient_comes_and_never_before_the_one_ahead(others: Others) -> None:
    parameters = parameters_of((2,), (2,), (2,))
    gradients = gradients_of(parameters, bucket_bytes=8)  # a bucket each: p2, p1, p0
    first, second, third = parameters.values()
    gradients.begin()
    (first.sum() + third.sum()).backward()
    assert others.left == 0, "a micro-batch that is not the step's last"
    gradients.arm(list(parameters.values()))
    third.sum().backward()
    assert others.left == 1
    first.sum().backward()
    assert others.left == 1, "p1's bucket is ahead of it"
    second.sum().backward()
    assert others.left == 3
    gradients.finish()
    assert others.left == 3
    assert [parameter.grad.tolist() for parameter in parameters.values() if parameter.grad is not None] == [[2, 2], [1, 1], [2, 2]]


def test_a_parameter_without_gradient_keeps_none_unless_another_rank_has_one(others: Others) -> None:
    parameters = parameters_of((2,), (2,), (2,))
    gradients = gradients_of(parameters)
    others.adds = [[10, 10, 20, 20, 0, 0, 1, 1, 0]]  # p2, p1, p0, and of which it has one
    used, elsewhere, never = parameters["p2"], parameters["p1"], parameters["p0"]
    gradients.begin()
    gradients.arm([used, elsewhere, never])
    used.sum().backward()
    assert others.left == 0
    gradients.finish()
    assert used.grad is not None
    assert elsewhere.grad is not None
    assert (used.grad.tolist(), elsewhere.grad.tolist(), never.grad) == ([11, 11], [20, 20], None)


def test_parts_go_to_their_own_places_and_repeated_ones_count_once(others: Others) -> None:
    """Columns 2 to 4 of a weight are shared with the other rank; rows of a lane's two ranks have the same gradient already."""
    weight, vector = nn.Parameter(torch.zeros(2, 4)), nn.Parameter(torch.zeros(2))
    holdings = {"w": ShardSpec(name="w", shape=(2, 6), dim=1, parts=((0, 2), (4, 6))), "v": ShardSpec(name="v", shape=(2,))}
    parts = [
        GradientGroup(name="w", dim=1, start=0, stop=2, ranks=(0,), repeats=(1,), stages=(0,)),
        GradientGroup(name="w", dim=1, start=4, stop=6, ranks=BOTH, repeats=(1, 1), stages=(0,)),
        GradientGroup(name="v", dim=None, ranks=BOTH, repeats=(2, 2), stages=(0,)),
    ]
    gradients = Gradients(0, parts, {"w": weight, "v": vector}, holdings, Recorder(torch.device("cpu")), bucket_bytes=1 << 20)
    others.adds = [[0.5, 0.5, 10, 20, 30, 40, 1, 1]]  # v, the shared columns of w row by row, and that it has both
    gradients.begin()
    gradients.arm([weight, vector])
    ((weight * torch.arange(8.0).view(2, 4)).sum() + vector.sum()).backward()
    gradients.finish()
    assert vector.grad is not None
    assert weight.grad is not None
    assert vector.grad.tolist() == [1, 1]
    assert weight.grad.tolist() == [[0, 1, 12, 23], [4, 5, 36, 47]]
