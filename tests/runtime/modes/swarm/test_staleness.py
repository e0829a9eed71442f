"""What staleness keeps in memory, as the cost model counts it."""

import asyncio
import threading

from torch import Tensor

from atoll.graph.capture import capture_program
from atoll.runtime.modes.swarm.compute import DividedJob, StageCompute, StageState

from .test_compute import BATCH, Model, job


class PartlyFrozen(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)


def held_by(state: StageState) -> dict[int, int]:
    """By address: bytes of the weights, those before the last step included."""
    tensors: list[Tensor] = [parameter for each in (state, state.before) if each for parameter in each.module.parameters_by_name().values()]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def test_second_weights_are_of_what_is_trained_also_after_a_step() -> None:
    it = job(model=PartlyFrozen)
    captured = capture_program(it)

    async def weights(staleness: int) -> list[int]:
        compute = StageCompute(DividedJob(it, captured, (0, 5), [(0, BATCH)], threading.Lock(), staleness=staleness))
        state = await compute.initial(0)
        found = [sum(held_by(state).values())]
        if staleness:
            state = compute._step_aside(state, compute.delayed(state))
            found.append(sum(held_by(state).values()))
        compute.close()
        return found

    used = [parameter for name, parameter in PartlyFrozen().named_parameters() if not name.startswith("unused")]
    once = 4 * sum(parameter.numel() for parameter in used)
    twice = once + 4 * sum(parameter.numel() for parameter in used if parameter.requires_grad)
    assert asyncio.run(weights(0)) == [once]
    assert asyncio.run(weights(1)) == [twice, twice]
