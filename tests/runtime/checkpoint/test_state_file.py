"""A stage's state as the bytes of a safetensors file, and checkpoints made of such files and cut into them."""

from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from atoll.errors import CheckpointError, DamagedCheckpointError
from atoll.runtime.checkpoint.checkpointer import Checkpointer
from atoll.runtime.checkpoint.export import export
from atoll.runtime.checkpoint.local_shard import LocalShard
from atoll.runtime.checkpoint.manifest import MODEL, RunIdentity, SmallState, read_index, read_manifest
from atoll.runtime.checkpoint.safetensors_file import DTYPES
from atoll.runtime.checkpoint.state_file import StateFile, StateReader, assemble_checkpoint, cut, newest_whole, state_checksums
from atoll.runtime.checkpoint.training_state import optimizer_state, training_state
from atoll.runtime.checkpoint.values import to_plain
from atoll.runtime.executor import LossScale
from atoll.runtime.modes.swarm.compute import chunk_range
from atoll.runtime.stage.shard_spec import ShardSpec

IDENTITY = RunIdentity(job="test", optimizer="AdamW", seed=1, batch_size=8)
_MADE = [dtype for dtype in DTYPES.values() if not dtype.is_floating_point or dtype.itemsize > 1]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    value = (torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) * 3).abs()
    value = value.to(draw(st.sampled_from(_MADE)))
    return value.t() if value.dim() == 2 and draw(st.booleans()) else value


@given(st.dictionaries(st.text(min_size=1, max_size=3).map(MODEL.__add__), tensors(), max_size=4), st.integers(1, 9))
def test_what_is_read_from_chunks_is_what_was_written(values: dict[str, Tensor], chunks: int) -> None:
    file = StateFile(values, SmallState(group_of={"a": 1}), {"x": 2})
    content = torch.cat([file.read(*chunk_range(file.length, chunks, chunk)) for chunk in range(chunks)])
    assert torch.equal(content, file.content())
    for found in (content, torch.cat([torch.zeros(3, dtype=torch.uint8), content])[3:]):  # wherever in memory it begins
        reader = StateReader(found)
        assert (reader.small.group_of, reader.extra) == ({"a": 1}, {"x": 2})
        for key, value in values.items():
            room = torch.zeros(value.shape, dtype=value.dtype)
            reader.fill(key, room)
            assert torch.equal(room, value)


def test_safetensors_reads_it_too(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    (tmp_path / "a.safetensors").write_bytes(StateFile({"model/w": torch.arange(5.0)}, SmallState(), {}).content().numpy().tobytes())
    assert load_file(tmp_path / "a.safetensors")["model/w"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_numbers_that_are_a_view_of_their_conjugates() -> None:
    value, room = torch.randn(3, dtype=torch.complex64).conj(), torch.zeros(3, dtype=torch.complex64)
    StateReader(StateFile({"model/w": value}, SmallState(), {}).content()).fill("model/w", room)
    assert torch.equal(room, value)


def test_what_cannot_be_stored_or_does_not_fit_is_told() -> None:
    with pytest.raises(CheckpointError, match=r"'model/w': torch.complex128 cannot be stored"):
        StateFile({"model/w": torch.zeros(2, dtype=torch.complex128)}, SmallState(), {})
    reader = StateReader(StateFile({"model/w": torch.zeros(2)}, SmallState(), {}).content())
    with pytest.raises(
        CheckpointError, match=r"'model/w' is torch.float32 of shape \[2\] there and torch.float32 of shape \[3\] in the job"
    ):
        reader.fill("model/w", torch.zeros(3))
    with pytest.raises(CheckpointError, match=r"does not have 'model/v'"):
        reader.fill("model/v", torch.zeros(2))


VALID = StateFile({"model/a": torch.arange(9.0), "model/b": torch.zeros(0)}, SmallState(), {"x": "y"}).content().numpy().tobytes()
CHANGED = st.builds(lambda at, new: VALID[:at] + new + VALID[at + len(new) :], st.integers(0, len(VALID)), st.binary(max_size=4))


@given(st.binary(max_size=64) | CHANGED)
def test_bytes_that_are_no_state_are_refused_and_nothing_else(content: bytes) -> None:
    with suppress(CheckpointError):
        StateReader(torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.zeros(0, dtype=torch.uint8))


@pytest.mark.parametrize("left", [0, 8, 20, len(VALID) - 1, len(VALID) - 30])
def test_a_state_that_is_cut_short_is_refused(left: int) -> None:
    with pytest.raises(CheckpointError, match=r"cut short|cannot be read"):
        StateReader(torch.frombuffer(bytearray(VALID[:left]) or bytearray(1), dtype=torch.uint8))


def trained() -> tuple[nn.Sequential, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight  # tied
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


def held_of(model: nn.Module, *prefixes: str) -> list[LocalShard]:
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return [LocalShard(ShardSpec(name=n, shape=tuple(v.shape)), v) for n, v in found.items() if n.startswith(prefixes or ("",))]


def stage_files(folder: Path) -> list[Path]:
    """Two stages, both of which have the tied weight."""
    model, optimizer, scheduler = trained()
    every = optimizer_state([optimizer], held_of(model))
    paths = []
    for number, prefixes in enumerate((("0.",), ("0.weight", "1.", "2."))):
        own = held_of(model, *prefixes)
        names = {part.name for part in own}
        kept = {key: part.tensor for key, part in every.tensors if part.name in names}
        small = msgspec.structs.replace(
            every.small,
            parameters={name: value for name, value in every.small.parameters.items() if name in names},
            group_of={name: value for name, value in every.small.group_of.items() if name in names},
        )
        extra = training_state(scheduler, LossScale(False), ())
        del extra["losses"]
        file = StateFile({MODEL + part.name: part.tensor for part in own} | kept, small, {k: to_plain(v, k) for k, v in extra.items()})
        paths.append(folder / f"stage-{number}.safetensors")
        paths[-1].write_bytes(file.content().numpy().tobytes())
    return paths


def assembled(folder: Path) -> Path:
    paths = stage_files(folder)
    extra = {"losses": [3.0, 2.0, 1.0], "swarm": {"epoch": 0, "bounds": [0, 1, 3]}}
    known = {paths[0]: state_checksums(torch.from_file(str(paths[0]), size=paths[0].stat().st_size, dtype=torch.uint8)), paths[1]: None}
    path, size = assemble_checkpoint(folder / "checkpoints", known, step=3, identity=IDENTITY, extra=extra, keep_last=2)
    assert size == sum(file.stat().st_size for file in paths)
    assert [file.stat().st_ino for file in sorted(path.glob("shard-*"))] == [file.stat().st_ino for file in paths], "not a byte is copied"
    return path


def test_stages_files_are_a_checkpoint_that_any_layout_loads(tmp_path: Path) -> None:
    assembled(tmp_path)
    model, optimizer, scheduler = trained()
    torch.manual_seed(1)
    again = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    again[2].weight = again[0].weight
    other = torch.optim.AdamW(again.parameters(), lr=0.5)
    loaded = Checkpointer(tmp_path / "checkpoints", identity=IDENTITY).load(held_of(again), optimizers=[other])
    assert loaded is not None
    assert loaded.extra["losses"] == [3.0, 2.0, 1.0]
    assert loaded.extra["scheduler"] == scheduler.state_dict()
    assert all(torch.equal(one, two) for one, two in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    assert str(other.state_dict()) == str(optimizer.state_dict())
    assert export(tmp_path, tmp_path / "out").step == 3


def test_any_stage_is_cut_out_of_any_checkpoint(tmp_path: Path) -> None:
    model, optimizer, scheduler = trained()
    with Checkpointer(tmp_path / "whole", identity=IDENTITY) as checkpoints:
        extra = training_state(scheduler, LossScale(False), [1.0])
        checkpoints.save(1, held_of(model), optimizers=[optimizer], extra=extra, final=True)
    for path in (assembled(tmp_path), tmp_path / "whole" / "step-00000001"):
        reader = StateReader(cut(path, ["0.bias", "0.weight", "nothing"]))
        assert set(reader.index.tensors) == {
            f"{what}/{name}" for what in ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq") for name in ("0.bias", "0.weight")
        }
        moment = torch.zeros(4, 4)
        reader.fill("optimizer/exp_avg/0.weight", moment)
        assert torch.equal(moment, optimizer.state[model[0].weight]["exp_avg"])
        assert set(reader.small.parameters) == {"0.bias", "0.weight"}


def test_damage_is_noticed_in_copies_too_and_the_one_before_is_used(tmp_path: Path) -> None:
    path = assembled(tmp_path)
    assert newest_whole(tmp_path / "checkpoints").step == 3  # type: ignore[union-attr]
    index = read_index(path, read_manifest(path))
    assert index.tensors["model/0.weight"].copies, "both stages have it"
    for victim in sorted(path.iterdir()):
        good = victim.read_bytes()
        for place in range(0, len(good), 61):
            victim.unlink()  # the link, not the bytes that others have
            victim.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
            with pytest.raises(DamagedCheckpointError):
                newest_whole(tmp_path / "checkpoints")
        victim.write_bytes(good)
    files = dict.fromkeys(stage_files(tmp_path))
    whole = partial(assemble_checkpoint, tmp_path / "checkpoints", files, identity=IDENTITY, extra={}, keep_last=2)
    whole(step=4)
    (tmp_path / "checkpoints" / "step-00000004" / "state.json").unlink()
    found = newest_whole(tmp_path / "checkpoints")
    assert found is not None
    assert (found.step, len(found.notes)) == (3, 1)


def test_a_checkpoint_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    paths = stage_files(tmp_path)
    paths[1].write_bytes(b"rubbish")
    with pytest.raises(CheckpointError):
        assemble_checkpoint(tmp_path / "checkpoints", dict.fromkeys(paths), step=3, identity=IDENTITY, extra={}, keep_last=2)
    assert list((tmp_path / "checkpoints").iterdir()) == []
