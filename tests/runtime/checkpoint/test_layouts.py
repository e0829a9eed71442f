"""Any division to any other, through files, without processes: what every rank wrote is read as every other rank wants it."""

import random
from pathlib import Path

import pytest
import torch

from atoll.errors import CheckpointError
from atoll.runtime.checkpoint.assignment import Outline, assign, outlines
from atoll.runtime.checkpoint.checkpointer import Staging
from atoll.runtime.checkpoint.local_shard import LocalShard, pieces
from atoll.runtime.checkpoint.manifest import Index, StoredTensor
from atoll.runtime.checkpoint.rectangles import Rectangle, whole
from atoll.runtime.checkpoint.safetensors_file import DTYPES
from atoll.runtime.checkpoint.storage import check_chunks, read_pieces, write_pieces

from .layouts import divide, tensors


def _divided(seed: int, ranks: int, values: dict[str, torch.Tensor]) -> list[list[LocalShard]]:
    generator = random.Random(seed)
    held: list[list[LocalShard]] = [[] for _ in range(ranks)]
    for name, value in values.items():
        for rank, mine in enumerate(divide(generator, value, name, ranks)):
            held[rank].extend(mine)
    return held


def _write(directory: Path, held: list[list[LocalShard]]) -> Index:
    mine = [pieces([(part.name, part) for part in parts]) for parts in held]
    layouts = [outlines([(part.name, part) for part in parts], own) for parts, own in zip(held, mine, strict=True)]
    sizes = {key: DTYPES[outline.dtype].itemsize for layout in layouts for key, outline in layout.items()}
    stored: dict[str, StoredTensor] = {
        key: StoredTensor(shape=outline.shape, dtype=outline.dtype, chunks=()) for layout in layouts for key, outline in layout.items()
    }
    files: dict[str, int] = {}
    for rank, assigned in enumerate(assign(layouts, sizes)):
        written = write_pieces(directory, rank, Staging().copy(mine[rank], assigned))
        files |= written.files
        for key, chunks in written.chunks.items():
            stored[key] = StoredTensor(shape=stored[key].shape, dtype=stored[key].dtype, chunks=(*stored[key].chunks, *chunks))
    return Index(tensors=stored, files=files)


@pytest.mark.parametrize("seed", range(40))
def test_any_division_becomes_any_other(tmp_path: Path, seed: int) -> None:
    values = tensors(seed)
    index = _write(tmp_path, _divided(seed, 1 + seed % 5, values))
    for key, stored in index.tensors.items():
        assert sum(chunk.rectangle.elements for chunk in stored.chunks) == values[key].numel(), "every number is written once"
    wanted = _divided(seed + 1000, 1 + seed % 4, values)
    for rank in wanted:
        expected = [part.tensor.clone() for part in rank]
        for part in rank:
            part.tensor.zero_()
        read_pieces(tmp_path, index, pieces([(part.name, part) for part in rank]))
        for part, right in zip(rank, expected, strict=True):
            assert torch.equal(part.tensor, right), part
    check_chunks(tmp_path, index, [(key, chunk) for key, stored in index.tensors.items() for chunk in stored.chunks])


def test_replicated_tensors_are_spread_evenly() -> None:
    layout = {f"layer{n}": Outline(shape=(64, n + 1), dtype="F32", rectangles=(whole((64, n + 1)),)) for n in range(30)} | {
        "embedding": Outline(shape=(50_000, 1024), dtype="F32", rectangles=(whole((50_000, 1024)),))
    }
    assigned = assign([layout] * 4, dict.fromkeys(layout, 4))
    loads = [sum(one.rectangle.elements for one in mine) for mine in assigned]
    assert max(loads) - min(loads) <= 64 * 30
    assert sum(loads) == 50_000 * 1024 + 64 * sum(range(1, 31))


def test_replicas_that_split_differently() -> None:
    def part(*rectangles: Rectangle) -> dict[str, Outline]:
        return {"w": Outline(shape=(8, 4), dtype="F32", rectangles=rectangles)}

    layouts = [
        part(Rectangle((0, 0), (6, 4))),
        part(Rectangle((6, 0), (2, 4))),
        part(Rectangle((0, 0), (8, 1))),
        part(Rectangle((0, 1), (8, 3))),
    ]
    assigned = assign(layouts, {"w": 4})
    marks = torch.zeros(8, 4, dtype=torch.int)
    for rank, mine in enumerate(assigned):
        for one in mine:
            marks[one.rectangle.slices()] += 1
            inside = torch.zeros(8, 4)
            inside[layouts[rank]["w"].rectangles[0].slices()] = 1
            assert inside[one.rectangle.slices()].all(), "a rank writes only what it holds"
    assert (marks == 1).all()


def test_what_nobody_holds_is_an_error() -> None:
    layout = {"w": Outline(shape=(8,), dtype="F32", rectangles=(Rectangle((0,), (5,)),))}
    with pytest.raises(CheckpointError, match=r"w: all ranks together hold 5 of its 8 elements"):
        assign([layout], {"w": 4})


def test_ranks_that_disagree_about_a_shape() -> None:
    layouts = [{"w": Outline(shape=(n,), dtype="F32", rectangles=(whole((n,)),))} for n in (8, 9)]
    with pytest.raises(CheckpointError, match=r"w: rank 0 has it as F32 \[8\], rank 1 as F32 \[9\]"):
        assign(layouts, {"w": 4})
