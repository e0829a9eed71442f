"""The stage executor: the same numbers wherever gradients go, and the end of a step."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from atoll.errors import JobFailedError
from atoll.graph.capture import Captured, capture_program
from atoll.runtime.checkpoint.training_state import optimizer_state
from atoll.runtime.executor import Accumulated, Contributed, GradientSink, LossScale, Update, Updater, scaled
from tests.runtime.stage.stage_chain import Chain, job_of

BATCH, SIZES = 8, (3, 5)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)
        self.register_buffer("lookup", torch.ones(6), persistent=False)
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.norm(self.first(x)) * self.lookup))  # type: ignore[operator,no-any-return]


def mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


def counted(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return model(batch["x"]).square().sum(), (batch["x"] > 0).sum()


def captured_with(loss: Callable[..., Any]) -> Captured:
    return capture_program(job_of(Model, loss, lambda samples: {"x": torch.randn(samples, 4)}))


@pytest.fixture(scope="module", params=[mean, counted])
def captured(request: pytest.FixtureRequest) -> Captured:
    return captured_with(request.param)


def chain_of(captured: Captured, *, contributed: bool = False, recompute: bool = False, fp16: bool = False) -> Chain:
    torch.manual_seed(3)
    bounds = [0, *captured.graph.cuts, len(captured.graph.layers)]
    chain = Chain(captured, Model(), bounds, recompute=recompute, gradients=Accumulated(BATCH))
    if contributed:
        sink: GradientSink = Contributed(BATCH, lambda: trained(chain))
        chain.executor._gradients = sink
    if fp16:
        chain.executor.updater.scale = LossScale(True)
    return chain


def trained(chain: Chain) -> list[nn.Parameter]:
    return [parameter for parameter in chain.parameters.values() if parameter.requires_grad]


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(size, 4, generator=generator)} for size in SIZES]


def train(chain: Chain) -> tuple[list[Tensor], list[list[Tensor | None]]]:
    """Totals of both micro-batches, and what each contributed to the parameters, stage by stage."""
    totals = [chain.forward(number, batch, size) for number, (batch, size) in enumerate(zip(batches(), SIZES, strict=True))]
    returned = [chain.backward(number, size) for number, size in enumerate(SIZES)]
    return totals, [[_sum([stage[i] for stage in one.values()]) for i in range(len(trained(chain)))] if one[0] else [] for one in returned]


def _sum(given: list[Tensor | None]) -> Tensor | None:
    found = [gradient for gradient in given if gradient is not None]
    return torch.stack(found).sum(0) if found else None


@pytest.mark.parametrize("fp16", [False, True])
def test_gradients_left_and_gradients_returned_are_the_same_up_to_what_they_are_divided_by(captured: Captured, fp16: bool) -> None:
    left, returned = chain_of(captured, fp16=fp16), chain_of(captured, contributed=True, fp16=fp16)
    shares, _ = train(left)
    totals, contributions = train(returned)
    divisor = 1.0 if left.executor.deferred else float(BATCH)
    torch.testing.assert_close(sum(totals), sum(shares) * divisor)
    for parameter, *made in zip(trained(left), *contributions, strict=True):
        expected = parameter.grad / left.executor.scale.value * divisor  # type: ignore[operator]
        torch.testing.assert_close(_sum(made), expected)


def test_recomputation_draws_the_same_numbers_and_changes_no_statistics(captured: Captured) -> None:
    plain, again = chain_of(captured), chain_of(captured, recompute=True)
    assert [float(total) for total in train(plain)[0]] == [float(total) for total in train(again)[0]]
    for one, other in zip(trained(plain), trained(again), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
    for left, right in zip(plain.executor.shards(), again.executor.shards(), strict=True):
        assert torch.equal(left.tensor, right.tensor), left.name


def test_what_is_forgotten_is_computed_once_more_with_the_same_numbers(captured: Captured) -> None:
    chain = chain_of(captured)
    first = chain.forward(0, batches()[0], SIZES[0])
    assert chain.executor._kept
    chain.executor.forget(before_step=1)
    assert chain.executor._kept
    chain.executor.forget(before_step=2)
    assert not chain.executor._kept
    assert float(chain.forward(0, batches()[0], SIZES[0])) == float(first)


def test_shards_are_what_a_state_dict_has_in_the_executors_own_memory(captured: Captured) -> None:
    chain = chain_of(captured)
    shards = {shard.name: shard for shard in chain.executor.shards()}
    expected = {name: value for name, value in chain.model.state_dict().items() if not name.endswith("num_batches_tracked")}
    assert expected.keys() <= shards.keys() <= chain.model.state_dict().keys(), "each once, and no buffer that is not persistent"
    optimizer = torch.optim.AdamW(trained(chain))
    chain.executor.updater = Updater(trained(chain), optimizer, None, LossScale(False), steps=1)
    train(chain)
    assert chain.executor.apply(Update(1))
    for name, parameter in chain.parameters.items():
        assert torch.equal(shards[name].tensor, parameter), "a step is seen in shards taken before it"
    state = optimizer_state([optimizer], list(shards.values()))
    names = {name for name, parameter in chain.parameters.items() if parameter.requires_grad}
    assert {key for key, _ in state.tensors} == {f"optimizer/{kind}/{name}" for kind in ("exp_avg", "exp_avg_sq") for name in names}


def updater_of(parameter: nn.Parameter, scale: bool = False) -> Updater:
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    return Updater([parameter], optimizer, StepLR(optimizer, 1, 0.5), LossScale(scale), steps=2)


def test_an_update_multiplies_gradients_steps_and_moves_the_schedule() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, 2.0]))
    updater = updater_of(parameter)
    parameter.grad = torch.tensor([2.0, 4.0])
    assert updater.apply(Update(1, factor=0.5))
    assert parameter.tolist() == [0.0, 0.0]
    assert updater.apply(Update(2, gradients=[torch.tensor([2.0, 4.0])]))
    assert parameter.tolist() == [-1.0, -2.0]
    assert parameter.grad is None, "gradients that were given are taken back"


def test_an_overflow_moves_the_loss_scale_alone() -> None:
    parameter = nn.Parameter(torch.ones(2))
    updater = updater_of(parameter, scale=True)
    parameter.grad = torch.tensor([math.inf, 1.0])
    assert not updater.apply(Update(1, overflowed=True))
    assert parameter.tolist() == [1.0, 1.0]
    assert (updater.scale.value, updater.optimizer.param_groups[0]["lr"]) == (32768.0, 1.0)  # type: ignore[union-attr]


@pytest.mark.parametrize("spoilt", [None, math.inf, math.nan])
def test_unscaling_gives_gradscalers_gradients_and_finds_overflows(spoilt: float | None) -> None:
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(2))]
    updater = Updater(parameters, torch.optim.SGD(parameters), None, LossScale(True), steps=1)
    gradients = [torch.tensor([3e30, -1.5, 1e-3]), torch.tensor(-7.0 if spoilt is None else spoilt)]
    for parameter, gradient in zip(parameters, gradients, strict=False):
        parameter.grad = gradient * 65536.0
    assert updater.unscale() == (spoilt is not None)
    assert torch.equal(parameters[0].grad, gradients[0])  # type: ignore[arg-type]
    assert parameters[2].grad is None


def test_a_loss_of_few_bits_is_widened_before_it_is_scaled() -> None:
    """An fp16 loss of 2 times the first scale is more than fp16 can hold."""
    loss = torch.tensor(2.0, dtype=torch.float16)
    assert float(scaled(loss, 65536.0)) == 131072.0
    assert scaled(loss, 1.0) is loss
    assert scaled(loss.double(), 65536.0).dtype is torch.float64


def test_an_optimizer_that_fails_is_named() -> None:
    parameter = nn.Parameter(torch.ones(2))
    updater = updater_of(parameter)
    parameter.grad = torch.ones(2)
    updater.optimizer.register_step_pre_hook(partial(_fail))  # type: ignore[union-attr]
    with pytest.raises(JobFailedError, match="step 7: the optimizer failed: ArithmeticError: no"):
        updater.apply(Update(7))


def _fail(*given: object) -> None:
    raise ArithmeticError("no")


@given(st.lists(st.booleans(), max_size=60))
def test_the_loss_scale_moves_as_gradscalers_does(overflows: list[bool]) -> None:
    own, scaler = LossScale(True), torch.amp.GradScaler("cpu")
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for overflowed in overflows:
        scaler.scale(parameter.sum())
        parameter.grad = torch.tensor([math.inf if overflowed else 0.0])
        scaler.step(optimizer)
        scaler.update()
        own.update(overflowed)
        assert own.value == scaler.get_scale()


def test_the_loss_scale_doubles_after_many_good_steps_and_survives_a_checkpoint() -> None:
    scale = LossScale(True)
    for _ in range(1999):
        scale.update(False)
    again = LossScale(True)
    again.restore(scale.state())
    assert again.value == 65536.0
    again.update(False)
    assert again.value == 2 * 65536.0
    without = LossScale(False)
    without.update(True)
    assert without.value == 1.0
