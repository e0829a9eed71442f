"""Decision: which frozen buffers make up a step. A pure function; exactness rests on it.

Chosen buffers are pairwise disjoint; where their union is every micro-batch, their sum is the gradient of the step, each micro-batch once.
"""

from collections.abc import Iterable

import msgspec

from atoll.control.messages import BufferId, BufferManifest, Manifest

__all__ = ["Choice", "choose", "choose_stages"]


class Choice(msgspec.Struct, frozen=True):
    """Buffers to be summed for one stage, and what none of them holds."""

    buffers: tuple[BufferId, ...]
    missing: frozenset[int]
    loss: float
    weight: float


def choose(manifests: Iterable[Manifest], micro_batches: frozenset[int]) -> Choice:
    """Keeps disjoint buffers greedily, largest first; equal ones by name, so that everybody would choose alike."""
    found: list[tuple[BufferManifest, BufferId]] = [
        (buffer, (manifest.worker, manifest.incarnation, buffer.index)) for manifest in manifests for buffer in manifest.buffers
    ]
    found.sort(key=lambda pair: (-len(pair[0].micro_batches), pair[1]))
    held: set[int] = set()
    chosen: list[BufferId] = []
    loss = weight = 0.0
    for buffer, identity in found:
        if not buffer.micro_batches or not buffer.micro_batches <= micro_batches:
            continue
        if not held.isdisjoint(buffer.micro_batches):
            continue
        held |= buffer.micro_batches
        chosen.append(identity)
        loss += buffer.loss
        weight += buffer.weight
    return Choice(buffers=tuple(chosen), missing=micro_batches - held, loss=loss, weight=weight)


def choose_stages(manifests: Iterable[Manifest], stages: int, micro_batches: frozenset[int]) -> tuple[Choice, ...]:
    """The choice of every stage."""
    by_stage: list[list[Manifest]] = [[] for _ in range(stages)]
    for manifest in manifests:
        by_stage[manifest.stage].append(manifest)
    return tuple(choose(row, micro_batches) for row in by_stage)
