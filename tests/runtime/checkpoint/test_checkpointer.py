"""A Checkpointer in one process: what is saved comes back, and what is wrong is named."""

import hashlib
import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from atoll.errors import CheckpointError, DamagedCheckpointError, JobFailedError
from atoll.events import CheckpointFailed, CheckpointSaved
from atoll.runtime.checkpoint.checkpointer import Checkpointer
from atoll.runtime.checkpoint.directory import find, steps
from atoll.runtime.checkpoint.exchange import CheckpointRanks
from atoll.runtime.checkpoint.loading import load_from
from atoll.runtime.checkpoint.local_shard import LocalShard
from atoll.runtime.checkpoint.manifest import RunIdentity, seal
from atoll.runtime.stage.shard_spec import ShardSpec

IDENTITY = RunIdentity(job="test", optimizer="AdamW", seed=1, batch_size=8, plan="one device")


def hold(model: nn.Module) -> list[LocalShard]:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return [LocalShard(ShardSpec(name=name, shape=tuple(value.shape)), value) for name, value in named.items()]


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    batch = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


_OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "plain SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "groups": lambda p: torch.optim.AdamW([{"params": p[:2], "lr": 0.1}, {"params": p[2:], "weight_decay": 0.3}]),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
}


@pytest.mark.parametrize("kind", _OPTIMIZERS)
def test_resuming_goes_on_bit_for_bit(tmp_path: Path, kind: str) -> None:
    def start(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        model = model_of(seed)
        optimizer = _OPTIMIZERS[kind](list(model.parameters()))
        return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 5], gamma=0.5)

    model, optimizer, scheduler = start(0)
    with Checkpointer(tmp_path, identity=IDENTITY) as checkpoints:
        for step in range(1, 4):
            train(model, optimizer, step)
            scheduler.step()
        extra = {"scheduler": scheduler.state_dict(), "random": torch.get_rng_state(), "position": 3}
        checkpoints.save(3, hold(model), optimizers=[optimizer], extra=extra)
        expected = [train(model, optimizer, step) for step in (4, 5)]  # while it is being written
    again, other, schedule = start(7)
    loaded = Checkpointer(tmp_path, identity=IDENTITY).load(hold(again), optimizers=[other])
    assert loaded is not None
    assert (loaded.step, loaded.extra["position"], loaded.differences) == (3, 3, ())
    assert torch.equal(loaded.extra["random"], extra["random"])
    schedule.load_state_dict(loaded.extra["scheduler"])
    assert schedule.state_dict() == extra["scheduler"]
    assert [train(again, other, step) for step in (4, 5)] == expected
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))


def test_a_tensor_that_a_rank_has_twice(tmp_path: Path) -> None:
    def twice(value: float) -> list[LocalShard]:
        return [LocalShard(ShardSpec(name="w", shape=(4, 3)), torch.full((4, 3), value, requires_grad=True)) for _ in range(2)]

    held = twice(2.0)
    optimizer = torch.optim.AdamW([part.tensor for part in held])
    for part in held:
        part.tensor.grad = torch.ones(4, 3)
    optimizer.step()
    Checkpointer(tmp_path, identity=IDENTITY).save(1, held, optimizers=[optimizer], final=True)
    again = twice(0.0)
    other = torch.optim.AdamW([part.tensor for part in again])
    Checkpointer(tmp_path, identity=IDENTITY).load(again, optimizers=[other])
    for part in again:
        assert torch.equal(part.tensor, held[0].tensor)
        assert torch.equal(other.state[part.tensor]["exp_avg"], optimizer.state[held[0].tensor]["exp_avg"])


def test_nothing_to_load(tmp_path: Path) -> None:
    assert Checkpointer(tmp_path, identity=IDENTITY).load(hold(model_of(0))) is None
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 4; it has none"):
        Checkpointer(tmp_path, identity=IDENTITY).load(hold(model_of(0)), step=4)


def test_old_checkpoints_are_removed(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, identity=IDENTITY, keep_last=2) as checkpoints:
        for step in (3, 6, 9, 12):
            checkpoints.save(step, hold(model_of(step)))
    assert steps(tmp_path) == [9, 12]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000009", "step-00000012"]
    model = model_of(0)
    loaded = Checkpointer(tmp_path, identity=IDENTITY).load(hold(model), step=9)
    assert loaded is not None
    assert torch.equal(model.state_dict()["0.weight"], model_of(9).state_dict()["0.weight"])


def test_going_back_to_an_earlier_step(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, identity=IDENTITY, keep_last=None) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, hold(model_of(step)))
    model = model_of(0)
    with Checkpointer(tmp_path, identity=IDENTITY, keep_last=None) as checkpoints:
        checkpoints.load(hold(model), step=1)
        checkpoints.save(2, hold(model_of(22)))
    loaded = Checkpointer(tmp_path, identity=IDENTITY).load(hold(model))
    assert loaded is not None
    assert loaded.step == 2, "not 3, which belongs to what was given up"
    assert torch.equal(model.state_dict()["0.weight"], model_of(22).state_dict()["0.weight"])


def test_outcomes_are_events(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path, identity=IDENTITY)
    checkpoints.save(1, hold(model_of(0)))
    checkpoints.save(1, hold(model_of(0)), final=True)  # the same state: nothing to do
    (outcome,) = checkpoints.finished()
    event = outcome.event(5.0)
    assert isinstance(event, CheckpointSaved)
    assert event.size_bytes == sum(path.stat().st_size for path in outcome.path.glob("*.safetensors"))
    assert checkpoints.finished() == []


def test_a_save_that_fails_does_not_end_the_run_unless_it_is_the_last(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, identity=IDENTITY) as checkpoints:
        checkpoints.save(1, hold(model_of(1)), final=True)
        (tmp_path / "step-00000002.partial").write_text("in the way")
        checkpoints.save(2, hold(model_of(2)))
        checkpoints.wait()
        saved, failed = checkpoints.finished()
        assert saved.error is None
        event = failed.event(0.0)
        assert isinstance(event, CheckpointFailed)
        assert "step-00000002.partial: cannot write it: Not a directory" in event.message
        with pytest.raises(JobFailedError, match=r"step 2: the last checkpoint could not be saved: .*Not a directory"):
            checkpoints.save(2, hold(model_of(2)), final=True)
    (tmp_path / "step-00000002.partial").unlink()
    loaded = Checkpointer(tmp_path, identity=IDENTITY).load(hold(model_of(0)))
    assert loaded is not None
    assert loaded.step == 1


def test_values_that_cannot_be_saved_are_named(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path, identity=IDENTITY)
    with pytest.raises(JobFailedError, match=r"scheduler\.f: a function cannot be saved"):
        checkpoints.save(1, hold(model_of(0)), extra={"scheduler": {"f": hold}}, final=True)


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write it: Not a directory"):
        Checkpointer(tmp_path / "file" / "checkpoints", identity=IDENTITY)


def _saved(directory: Path) -> Path:
    model = model_of(0)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    Checkpointer(directory, identity=IDENTITY).save(1, hold(model), optimizers=[optimizer], final=True)
    return directory / "step-00000001"


def _load(directory: Path, model: nn.Module | None = None, identity: RunIdentity = IDENTITY) -> tuple[str, ...]:
    model = model or model_of(0)
    loaded = Checkpointer(directory, identity=identity).load(hold(model), optimizers=[torch.optim.AdamW(model.parameters())])
    assert loaded is not None
    return loaded.differences


def test_plain_torch_reads_it_too(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    model = model_of(0)
    train(model, torch.optim.AdamW(model.parameters()), 1)
    state = {f"model/{name}": torch.zeros_like(value) for name, value in model.named_parameters()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(path)))
    assert all(torch.equal(state[f"model/{name}"], value) for name, value in model.named_parameters())


class _Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.path),))


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    pickled = pickle.dumps(_Malicious(tmp_path / "owned"))
    for name in (".metadata", "__0_0.distcp", "model.pt", "pytorch_model.bin", "__0.metadata", "extra.safetensors"):
        (path / name).write_bytes(pickled)
    (tmp_path / "latest.pt").write_bytes(pickled)
    assert _load(tmp_path) == ()
    for victim in sorted(path.glob("shard-*.safetensors")) + [path / name for name in ("index.json", "state.json", "manifest.json")]:
        good = victim.read_bytes()
        victim.write_bytes(pickled)
        with pytest.raises(CheckpointError, match=victim.name):
            _load(tmp_path)
        victim.write_bytes(good)
    assert not (tmp_path / "owned").exists()
    pickle.loads(pickled)
    assert (tmp_path / "owned").exists(), "the pickle would have worked"


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def _flip_header(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[9] ^= 255
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [_truncate, _flip, _flip_header, Path.unlink])
@pytest.mark.parametrize("kind", ["shard-*.safetensors", "index.json", "state.json"])
def test_damage_is_named(tmp_path: Path, damage: Callable[[Path], None], kind: str) -> None:
    (victim,) = _saved(tmp_path).glob(kind)
    damage(victim)
    with pytest.raises(CheckpointError, match=victim.name) as caught:
        _load(tmp_path)
    if kind.startswith("shard") and damage is not _flip_header:
        assert "'model/" in str(caught.value) or "'optimizer/" in str(caught.value)


def test_an_index_cannot_lead_out_of_the_checkpoint(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    index = json.loads((path / "index.json").read_text())
    index["files"]["../../secret.safetensors"] = {"size_bytes": 5, "header_crc32": 0}
    _reseal(path, index)
    with pytest.raises(CheckpointError, match=r"'../../secret.safetensors' is not the name of a safetensors file in the checkpoint"):
        _load(tmp_path)


def test_an_index_with_holes(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    index = json.loads((path / "index.json").read_text())
    index["tensors"]["model/0.weight"]["chunks"] = []
    _reseal(path, index)
    with pytest.raises(CheckpointError, match=r"'model/0.weight': its chunks do not make up a tensor of shape \[6, 4\]"):
        _load(tmp_path)


def _reseal(path: Path, index: object) -> None:
    text = msgspec.json.encode(index)
    (path / "index.json").write_bytes(text)
    manifest = json.loads((path / "manifest.json").read_text())["content"]
    manifest["sha256"]["index.json"] = hashlib.sha256(text).hexdigest()
    (path / "manifest.json").write_bytes(seal(msgspec.json.encode(manifest)))


def test_another_model_is_refused(tmp_path: Path) -> None:
    _saved(tmp_path)
    with pytest.raises(CheckpointError, match=r"it does not have '3.weight', '3.bias'"):
        _load(tmp_path, nn.Sequential(*model_of(0), nn.Linear(2, 2)))
    with pytest.raises(CheckpointError, match=r"it has '2.bias', '2.weight', which the job's model has not"):
        _load(tmp_path, nn.Sequential(*list(model_of(0))[:2]))
    with pytest.raises(CheckpointError, match=r"'model/2.weight' has the shape \[2, 6\] there and \[3, 6\] in the job"):
        _load(tmp_path, nn.Sequential(*list(model_of(0))[:2], nn.Linear(6, 3)))
    with pytest.raises(CheckpointError, match=r"'model/0.weight' is torch.float32 there and torch.bfloat16 in the job"):
        _load(tmp_path, model_of(0).bfloat16())


def test_another_run_is_refused_or_told(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    with pytest.raises(CheckpointError, match=r"saved with the optimizer AdamW and the job has SGD"):
        _load(tmp_path, identity=msgspec.structs.replace(IDENTITY, optimizer="SGD"))
    changed = msgspec.structs.replace(IDENTITY, seed=2, batch_size=16)
    assert _load(tmp_path, identity=changed) == ("the seed was 1 and is 2", "the batch size was 8 and is 16")
    manifest = json.loads((path / "manifest.json").read_text())["content"] | {"format": 3}
    for text in (seal(msgspec.json.encode(manifest)), msgspec.json.encode(manifest)):
        (path / "manifest.json").write_bytes(text)
        with pytest.raises(CheckpointError, match=r"manifest.json: format 3; this Atoll reads format 2"):
            _load(tmp_path)


def _bits(path: Path) -> Iterator[bytes]:
    """The file with one bit of it flipped: one in every byte."""
    good = path.read_bytes()
    for place in range(len(good)):
        data = bytearray(good)
        data[place] ^= 1 << place % 8
        yield bytes(data)


def test_one_flipped_bit_is_noticed_wherever_it_is(tmp_path: Path) -> None:
    """In every small file and every shard, headers included: what was saved is loaded, or it is refused as damaged."""
    held = [LocalShard(ShardSpec(name="w", shape=(3,)), torch.arange(3.0))]
    Checkpointer(tmp_path, identity=IDENTITY).save(1, held, extra={"losses": [0.5]}, final=True)
    for victim in sorted((tmp_path / "step-00000001").iterdir()):
        good = victim.read_bytes()
        for damaged in _bits(victim):
            victim.write_bytes(damaged)
            with pytest.raises(DamagedCheckpointError, match=victim.name):
                load_from(CheckpointRanks(None), tmp_path, IDENTITY, held, (), None)
        victim.write_bytes(good)
    assert load_from(CheckpointRanks(None), tmp_path, IDENTITY, held, (), None) is not None


def test_a_flipped_bit_of_latest_never_leads_back(tmp_path: Path) -> None:
    held = [LocalShard(ShardSpec(name="w", shape=(3,)), torch.arange(3.0))]
    checkpoints = Checkpointer(tmp_path, identity=IDENTITY)
    for step in (2, 3):
        checkpoints.save(step, held, final=True)
    for damaged in _bits(tmp_path / "latest"):
        (tmp_path / "latest").write_bytes(damaged)
        assert find(tmp_path, None) == tmp_path / "step-00000003"


@pytest.mark.parametrize("victim", ["manifest.json", "index.json", "state.json", "shard-00001-model-00001-of-00001.safetensors"])
def test_where_the_newest_is_damaged_the_newest_whole_one_is_used(tmp_path: Path, victim: str) -> None:
    checkpoints = Checkpointer(tmp_path, identity=IDENTITY, keep_last=3)
    for step in (1, 2, 3):
        held = [LocalShard(ShardSpec(name="w", shape=(3,)), torch.full((3,), float(step)))]
        checkpoints.save(step, held, extra={"losses": [0.5] * step}, final=True)
    _flip(tmp_path / "step-00000003" / victim)
    held = [LocalShard(ShardSpec(name="w", shape=(3,)), torch.zeros(3))]
    loaded = Checkpointer(tmp_path, identity=IDENTITY).load(held)
    assert loaded is not None
    assert (loaded.step, held[0].tensor.tolist(), len(loaded.extra["losses"])) == (2, [2.0] * 3, 2)
    (note,) = loaded.differences
    assert note.startswith("step-00000003 is damaged and was passed over: ")
    assert victim in note
    with pytest.raises(DamagedCheckpointError, match=victim):  # one that is asked for by name is not replaced by another
        checkpoints.load(held, step=3)
    for step in (1, 2):
        (tmp_path / f"step-{step:08d}" / "state.json").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"nor is any of the 2 before it whole"):
        checkpoints.load(held)
