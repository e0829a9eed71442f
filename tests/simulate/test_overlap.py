"""The cost model's words on staleness against the protocol's own code, on a virtual clock."""

import pytest

from atoll.control import Settings
from atoll.cost.synchronisation import overlapped_ending
from atoll.simulate.peers import PeerModel, PeerSwarm

STEPS, SETTLED = 12, 4
LINKS = 1e8


def step_seconds(staleness: int, gradient_bytes: float, micro_batches: int = 32) -> float:
    """Between commits of two stages of two workers each, once steps are regular."""
    model = PeerModel(
        forward_seconds=0.1,
        backward_seconds=0.2,
        latency_seconds=1e-4,
        activation_bytes=1e5,
        gradient_bytes=gradient_bytes,
        bytes_per_s=LINKS,
        shared_links=True,
    )
    settings = Settings(stages=2, micro_batches=micro_batches, steps=2 * STEPS, chunks=32, staleness=staleness, rebalance_seconds=0.0)
    swarm = PeerSwarm(settings, model)
    for number in range(4):
        swarm.start(f"w{number}")
    swarm.loop.run(1e5, lambda: len(swarm.committed) >= STEPS)
    moments = [step.at_seconds for step in swarm.committed]
    return (moments[STEPS - 1] - moments[SETTLED - 1]) / (STEPS - SETTLED)


@pytest.mark.parametrize("gradient_bytes", [1e8, 6e8])  # sums that take less than computing the step, and more
def test_steps_with_staleness_take_the_longer_of_computing_and_summing(gradient_bytes: float) -> None:
    computing = step_seconds(0, 1.0)
    summing = step_seconds(0, gradient_bytes) - computing  # one after the other
    assert (summing > computing) == (gradient_bytes > 5e8)
    expected = overlapped_ending([computing], [summing], [0.0], [0.0]).seconds
    assert step_seconds(1, gradient_bytes) == pytest.approx(expected, rel=0.05)
