"""Shrink: the shortest schedule that still fails, found by leaving things out one after another."""

from collections.abc import Callable

import msgspec

from atoll.simulate.faults import Scenario

__all__ = ["shorten"]


def shorten(scenario: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """Leaves out faults, then kinds of bad network, then hosting, feeders and workers, as long as the scenario still fails."""
    shorter = True
    while shorter:
        shorter = False
        for candidate in _shorter(scenario):
            if fails(candidate):
                scenario, shorter = candidate, True
                break
    return scenario


def _shorter(scenario: Scenario) -> list[Scenario]:
    faults, shape = scenario.faults, scenario.shape
    found = [msgspec.structs.replace(scenario, faults=faults[:index] + faults[index + 1 :]) for index in range(len(faults))]
    for name in ("duplicate", "reorder", "delay", "corrupt", "state_seconds", "stop_at"):
        if getattr(scenario, name):
            found += [msgspec.structs.replace(scenario, **{name: 0.0})]
    if shape.hosting and shape.workers >= shape.stages:
        found.append(msgspec.structs.replace(scenario, shape=msgspec.structs.replace(shape, hosting=())))
    if shape.feeders > 1:
        found.append(msgspec.structs.replace(scenario, shape=msgspec.structs.replace(shape, feeders=shape.feeders - 1)))
    if shape.workers > shape.stages:
        found.append(msgspec.structs.replace(scenario, shape=msgspec.structs.replace(shape, workers=shape.workers - 1)))
    if shape.micro_batches > 1:
        found.append(msgspec.structs.replace(scenario, shape=msgspec.structs.replace(shape, micro_batches=shape.micro_batches - 1)))
    return found
