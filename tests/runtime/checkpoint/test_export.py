"""Exported files load in plain PyTorch and in transformers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from atoll.errors import CheckpointError
from atoll.runtime.checkpoint.checkpointer import Checkpointer
from atoll.runtime.checkpoint.export import _blocks, export
from atoll.runtime.checkpoint.local_shard import LocalShard
from atoll.runtime.checkpoint.manifest import RunIdentity, StoredTensor
from atoll.runtime.stage.shard_spec import ShardSpec

from .layouts import tensors
from .test_checkpointer import IDENTITY, hold, model_of


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight


@pytest.fixture(autouse=True)
def constructors_noted() -> None:
    """PyTorch notes once, when a device is first used as a context, which functions make tensors. Transformers' `from_pretrained` puts
    another function in the place of `torch.linspace` while it does so; noted then, it would be the wrong one for all tests that follow.
    """
    with torch.device("meta"):
        torch.empty(0)


def _save(directory: Path, model: nn.Module, identity: RunIdentity = IDENTITY) -> None:
    Checkpointer(directory / "checkpoints", identity=identity).save(5, hold(model), final=True)


def test_a_strict_load_in_plain_torch(tmp_path: Path) -> None:
    model = _Tied()
    identity = RunIdentity(job="t", optimizer="SGD", seed=0, batch_size=1, tied={"head.weight": "embedding.weight"})
    _save(tmp_path, model, identity)
    exported = export(tmp_path, tmp_path / "out.safetensors")
    assert exported.files == (tmp_path / "out.safetensors",)
    assert (exported.step, exported.tensors) == (5, len(model.state_dict()))
    again = _Tied()
    again.load_state_dict(load_file(tmp_path / "out.safetensors"))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))


def test_every_dtype_and_shape(tmp_path: Path) -> None:
    values = tensors(3)
    held = [LocalShard(ShardSpec(name=name, shape=tuple(value.shape)), value) for name, value in values.items()]
    Checkpointer(tmp_path, identity=IDENTITY).save(1, held, final=True)
    export(tmp_path, tmp_path / "folder")
    stored = load_file(tmp_path / "folder" / "model.safetensors")
    assert stored.keys() == values.keys()
    assert all(torch.equal(stored[name], value) and stored[name].dtype == value.dtype for name, value in values.items())


def test_several_files_and_their_index(tmp_path: Path) -> None:
    model = model_of(1)
    _save(tmp_path, model)
    exported = export(tmp_path, tmp_path / "folder", largest_file_bytes=100)
    index = json.loads((tmp_path / "folder" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == model.state_dict().keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in model.state_dict().values()) == exported.size_bytes
    assert set(index["weight_map"].values()) == {path.name for path in (tmp_path / "folder").glob("*.safetensors")}
    again = model_of(2)
    again.load_state_dict({key: value for path in exported.files[:-1] for key, value in load_file(path).items()})
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))


@pytest.mark.parametrize("tie", [True, False])
def test_transformers_loads_it(tmp_path: Path, tie: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20, n_positions=16, tie_word_embeddings=tie)
    model = transformers.GPT2LMHeadModel(config).eval()
    tied = {"lm_head.weight": "transformer.wte.weight"} if tie else {}
    identity = RunIdentity(
        job="t", optimizer="SGD", seed=0, batch_size=1, tied=tied, model_config=json.loads(config.to_json_string(use_diff=False))
    )
    _save(tmp_path, model, identity)
    export(tmp_path, tmp_path / "folder")
    again, report = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "folder", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.arange(10)[None]
    assert torch.equal(again.eval()(tokens).logits, model(tokens).logits)
    plain = transformers.GPT2LMHeadModel(config)
    plain.load_state_dict(load_file(tmp_path / "folder" / "model.safetensors"))
    assert torch.equal(plain.eval()(tokens).logits, model(tokens).logits)


def test_what_is_exported_and_what_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint there"):
        export(tmp_path, tmp_path / "x")
    with pytest.raises(CheckpointError, match=r"no such directory"):
        export(tmp_path / "nowhere", tmp_path / "x")
    _save(tmp_path, model_of(0))
    for source in (tmp_path, tmp_path / "checkpoints", tmp_path / "checkpoints" / "step-00000005"):
        assert export(source, tmp_path / "found").step == 5
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write it: (File exists|Not a directory)"):
        export(tmp_path, tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 6; it has 5"):
        export(tmp_path, tmp_path / "x", step=6)


@pytest.mark.parametrize("shape", [(3, 50_000_000), (1, 1, 70_000_000), (200, 1000, 1000), (5,), (), (0, 4)])
def test_blocks_are_small_and_in_the_order_of_bytes(shape: tuple[int, ...]) -> None:
    blocks = list(_blocks(StoredTensor(shape=shape, dtype="F32", chunks=())))
    strides = torch.empty(shape, device="meta").stride()
    at = 0
    for block in blocks:
        assert sum(offset * stride for offset, stride in zip(block.offsets, strides, strict=True)) == at
        assert torch.empty(shape, device="meta")[block.slices()].is_contiguous()
        assert block.elements * 4 <= 64 * 2**20
        at += block.elements
    assert at == torch.empty(shape, device="meta").numel()
