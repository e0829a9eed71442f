"""Random divisions of tensors over ranks, as plans make them: whole, in unequal parts, in blocks, flat, replicated or mixed."""

import random
from itertools import pairwise

import torch
from torch import Tensor

from atoll.runtime.checkpoint.local_shard import LocalShard
from atoll.runtime.stage.shard_spec import ShardSpec


def cuts(generator: random.Random, length: int, parts: int) -> list[tuple[int, int]]:
    """`parts` ranges, some perhaps empty, that make up `length`."""
    inner = sorted(generator.randint(0, length) for _ in range(parts - 1))
    bounds = [0, *inner, length]
    return list(pairwise(bounds))


def holdings(generator: random.Random, name: str, shape: tuple[int, ...], parts: int) -> list[ShardSpec]:
    """Holdings that together are the tensor, exactly once."""
    if parts == 1 or not shape:
        return [ShardSpec(name=name, shape=shape)] * parts
    dim = generator.randrange(len(shape))
    blocks = cuts(generator, shape[dim], generator.choice([1, 1, 3]))
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(parts)]
    for start, stop in blocks:
        for number, (a, b) in enumerate(cuts(generator, stop - start, parts)):
            if a < b:
                ranges[number].append((start + a, start + b))
    return [ShardSpec(name=name, shape=shape, dim=dim, parts=tuple(mine)) for mine in ranges]


def divide(generator: random.Random, whole: Tensor, name: str, ranks: int) -> list[list[LocalShard]]:
    """What each rank holds of a tensor, in memory of its own: replicas of different layouts, each perhaps sharded flat."""
    held: list[list[LocalShard]] = [[] for _ in range(ranks)]
    shape, start = tuple(whole.shape), 0
    while start < ranks:
        size = generator.randint(1, ranks - start) if start else generator.randint(1, ranks)
        if generator.random() < 0.3 and start:
            break  # these ranks hold nothing of it: another stage
        replica = list(range(start, start + size))
        tensor = generator.choice([n for n in range(1, size + 1) if size % n == 0])
        lanes = size // tensor
        for place, holding in enumerate(holdings(generator, name, shape, tensor)):
            flat = cuts(generator, holding.elements, lanes) if generator.random() < 0.5 else None
            for lane in range(lanes):
                held[replica[lane * tensor + place]].append(_take(whole, holding, None if flat is None else flat[lane]))
        start += size
    return held


def _take(whole: Tensor, holding: ShardSpec, flat: tuple[int, int] | None) -> LocalShard:
    part = holding.take(whole) if holding.dim is None or holding.parts else whole.new_empty(holding.local_shape)
    if flat is None:
        return LocalShard(holding, part.clone())
    return LocalShard(holding, part.reshape(-1)[flat[0] : flat[1]].clone(), flat)


def tensors(seed: int) -> dict[str, Tensor]:
    """A small model's worth, of several dtypes and shapes."""
    generator = torch.Generator().manual_seed(seed)
    dtypes = {"half": torch.float16, "brain": torch.bfloat16, "double": torch.float64}
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (13, 6),
        "fused.weight": (6, 12),
        "deep": (3, 4, 5),
        "bias": (7,),
        "scale": (),
        "empty": (0, 3),
        "half": (4, 4),
        "brain": (5, 2),
        "double": (2, 9),
    }
    result = {name: torch.randn(shape, generator=generator).to(dtypes.get(name, torch.float32)) for name, shape in shapes.items()}
    result["counts"] = torch.randint(0, 100, (8,), generator=generator)
    result["mask"] = torch.rand(9, generator=generator) > 0.5
    return result
