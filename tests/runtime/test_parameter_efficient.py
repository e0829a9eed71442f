"""What parameters that are not trained cost: nothing but their own memory, measured on runs of two processes and as predicted."""

from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from atoll.cli.main import run as atoll
from atoll.cluster import Cluster, Device, DeviceKind, Host, Link, Site
from atoll.cost import Cost, cost
from atoll.errors import CheckpointError
from atoll.graph.capture import Captured, capture_program
from atoll.plan import Plan
from atoll.runtime.checkpoint.manifest import read_index, read_manifest
from atoll.runtime.modes.lockstep.measurement import Exchange, exchange_bytes

from .modes.lockstep.equality_cases import plan_of
from .test_hugging_face import plain_loop
from .training_cases import BATCH, FROZEN, STEPS, gpt2, llama, lora_gpt2, lora_llama, pretrained, small_job

pytestmark = pytest.mark.timeout(600)
RANKS = "frozen"
CASES = [(name, number, plan) for name, (_, plans) in FROZEN.items() for number, plan in enumerate(plans)]
IDS = [f"{name}-{plan}" for name, _, plan in CASES]


def cluster() -> Cluster:
    kind = DeviceKind(name="core", cpu=True, memory_bytes=1e9, flops={"fp32": 1e11}, memory_bytes_per_s=1e10)
    link = Link(between=("h", "h"), bytes_per_s=1e9, latency_s=1e-5)
    devices = tuple(Device(name=name, kind=kind, host="h", site="s", memory_bytes=1e9) for name in "ab")
    host = Host(name="h", site="s", devices=devices, link=link)
    return Cluster(name="c", sites=(Site(name="s", hosts=(host,), link=msgspec.structs.replace(link, between=("s", "s"))),))


@cache
def captured(name: str) -> Captured:
    return capture_program(small_job(FROZEN[name][0]), divided=True)


@cache
def losses(name: str) -> list[float]:
    """Of plain PyTorch in one process."""
    job = small_job(FROZEN[name][0])
    return plain_loop(job.build_model("cpu"), job)


def predicted(name: str, plan: str) -> tuple[Plan, Cost]:
    graph = captured(name).graph
    made = plan_of(graph, plan, BATCH)
    return made, cost(graph, cluster(), made)


def counts(model: nn.Module) -> tuple[int, int]:
    trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    return sum(trained), sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("name", "number", "plan"), CASES, ids=IDS)
def test_what_is_held_and_sent_is_as_predicted(ranks: tuple[Path, list[dict[str, Any]]], name: str, number: int, plan: str) -> None:
    found = [rank[f"{name} {number}"] for rank in ranks[1]]
    assert found[0]["losses"] == pytest.approx(losses(name), rel=1e-5)
    made, expected = predicted(name, plan)
    for device, rank in zip("ab", found, strict=True):
        memory = expected.memory[device]
        assert rank["parameters"] == pytest.approx(memory.parameters, rel=0.02)
        assert rank["gradients"] == pytest.approx(memory.gradients, rel=0.02)
        assert rank["optimizer"] == pytest.approx(memory.optimizer, rel=0.02)
    exchanges = {(one["kind"], *one["ranks"]): msgspec.convert(one, Exchange) for rank in found for one in rank["exchanges"]}
    sent = sum(sum(exchange_bytes(cluster(), made, one).values()) for one in exchanges.values())
    assert sent == pytest.approx(sum(expected.link_bytes.values()), rel=0.10)


def test_gradients_and_optimizer_fall_as_the_trained_fraction(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    found = ranks[1]
    trained, everything = counts(lora_llama())
    assert trained < everything / 40
    two = found[0]["all 0"]
    assert two["gradients"] == 4 * trained
    assert two["optimizer"] == 8 * trained
    assert two["parameters"] == 4 * everything
    (reduced,) = [one for one in two["exchanges"] if one["kind"] == "all_reduce"]
    assert reduced["bytes"] == pytest.approx(4 * trained, rel=0.10)
    scattered = [one["bytes"] for one in found[0]["all 2"]["exchanges"] if one["kind"] == "reduce_scatter"]
    assert sum(scattered) == 4 * trained


def test_what_no_trained_parameter_needs_is_neither_sent_back_nor_gathered_again(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    found = ranks[1]
    assert [one["kind"] for one in found[1]["upper 0"]["exchanges"]] == ["all_reduce"], "no gradient of activations goes back"
    gathered = {name: next(one for one in found[0][name]["exchanges"] if one["kind"] == "all_gather") for name in ("all 2", "upper 1")}
    assert gathered["all 2"]["calls"] - gathered["upper 1"]["calls"] == 2, "two layers need nothing in backward"
    assert gathered["upper 1"]["bytes"] < gathered["all 2"]["bytes"]
    reduced = {
        name: sum(one["bytes"] for one in found[0][name]["exchanges"] if one["kind"] == "all_reduce") for name in ("all 3", "upper 2")
    }
    assert reduced["upper 2"] < 0.75 * reduced["all 3"]


def test_layers_without_a_gradient_keep_nothing_for_backward() -> None:
    layers = captured("upper").graph.layers
    flows = [layer.has_backward for layer in layers]
    assert flows == sorted(flows)
    assert not flows[0]
    assert flows[-1]
    assert all(layer.gradient_bytes == 0 and layer.saved_bytes < layers[-2].saved_bytes / 10 for layer in layers[:3])


def test_tensor_parallelism_sums_no_more_for_an_adapter_than_without_it() -> None:
    whole = capture_program(small_job(llama), divided=True).graph.layers
    assert [layer.tensor_bytes for layer in captured("all").graph.layers] == [layer.tensor_bytes for layer in whole]


def stored_bytes(run: Path) -> int:
    (newest,) = sorted((run / "checkpoints").glob("step-*"))[-1:]
    return sum(path.stat().st_size for path in newest.glob("*.safetensors"))


def test_a_checkpoint_has_what_is_trained_and_is_gone_on_from_under_another_plan(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, found = ranks
    assert found[0]["resumed"]["losses"] == pytest.approx(losses("all"), rel=1e-5)
    trained, everything = counts(lora_llama())
    (path,) = (folder / "resumed" / "checkpoints").glob(f"step-{STEPS:08d}")
    index = read_index(path, read_manifest(path))
    assert sum(stored.size_bytes for stored in index.tensors.values()) == 3 * 4 * trained, "weights and Adam's two moments"
    assert sum(torch.Size(one.shape).numel() for one in index.rebuilt.values()) == everything - trained
    assert stored_bytes(folder / "resumed") < 4 * everything / 3
    model = small_job(lora_llama).load_model(folder / "resumed")
    begun = small_job(lora_llama).build_model("cpu").state_dict()
    assert all(torch.equal(value, begun[name]) for name, value in model.state_dict().items() if "lora_" not in name)


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.runtime.training_cases import lora_gpt2, small_job
job = small_job(lora_gpt2, weights=Path(__file__).parent / "pretrained")
if __name__ == "__main__":
    job.run()
"""


def test_an_export_and_a_resumed_run_make_again_what_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, run = tmp_path / "adapt.py", tmp_path / "run"
    script.write_text(SCRIPT.format(root=str(Path(__file__).parents[2])))
    pretrained(tmp_path / "pretrained")
    assert atoll(["run", str(script), "--alone", "--out", str(run)]) == 0
    job = small_job(lora_gpt2, weights=tmp_path / "pretrained")
    whole = job.load_model(run)
    assert atoll(["export", str(run), "--to", str(tmp_path / "whole.safetensors")]) == 0
    exported, expected = load_file(tmp_path / "whole.safetensors"), dict(whole.state_dict())
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], value) for name, value in expected.items())
    assert atoll(["export", str(run), "--to", str(tmp_path / "merged"), "--merge"]) == 0
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        merged = type(gpt2()).from_pretrained(tmp_path / "merged").eval()(tokens).logits  # type: ignore[attr-defined]
        assert torch.allclose(merged, whole.eval()(tokens).logits, atol=1e-5)

    for part in (tmp_path / "pretrained").glob("*.safetensors"):
        content = bytearray(part.read_bytes())
        content[-1] ^= 1  # a bit of the last weight in the file
        part.write_bytes(content)
    capsys.readouterr()
    assert atoll(["run", str(script), "--alone", "--resume", str(run)]) == 2
    assert "which the job makes again" in (said := capsys.readouterr().err)
    assert "weights=" in said
    assert atoll(["export", str(run), "--to", str(tmp_path / "again.safetensors")]) == 2
    assert "came out otherwise" in capsys.readouterr().err
    assert atoll(["export", str(run), "--to", str(tmp_path / "adapter")]) == 0, "an adapter needs none of them"


class Half(nn.Module):
    """One layer is trained, one is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 64), nn.Linear(64, 3)
        self.first.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


def half_job(**given: Any) -> Any:
    from .training_cases import net_job

    return net_job(**{"model": Half, "ema_decay": None, "eval_ema": False, "scheduler": None, "parameter_groups": None} | given)


def left_out(run: Path) -> set[str]:
    (newest,) = sorted((run / "checkpoints").glob("step-*"))[-1:]
    return set(read_index(newest, read_manifest(newest)).rebuilt)


def test_what_cannot_be_made_again_is_stored(tmp_path: Path) -> None:
    torch.manual_seed(3)
    ready = Half()
    ways: dict[str, dict[str, Any]] = {
        "made": {},
        "built": {"model": Half()},
        "found": {"model": lambda: ready},
        "asked": {"store_frozen": True},
    }
    for name, given in ways.items():
        half_job(**given).run(out=tmp_path / name, progress=False)
    assert left_out(tmp_path / "made") == {"first.weight", "first.bias"}
    assert not any(left_out(tmp_path / name) for name in ("built", "found", "asked"))
    loaded = half_job().load_model(tmp_path / "asked")
    assert torch.equal(loaded.first.weight, half_job().build_model().first.weight)  # type: ignore[arg-type, union-attr]
    with pytest.raises(CheckpointError, match=r"makes again, and 'first.bias' and 1 more came out otherwise"):
        half_job(seed=1).load_model(tmp_path / "made")


def test_frozen_weights_that_change_all_the_same_are_found_out_and_stored(tmp_path: Path) -> None:
    from atoll import RunHandle
    from atoll.events import CheckpointFailed

    model: list[Any] = []

    def made() -> nn.Module:
        model.append(Half())
        return model[-1]  # type: ignore[no-any-return]

    told: list[Any] = []

    def meddle(event: Any, run: RunHandle) -> None:
        told.append(event)
        if event.kind == "step_finished" and event.step == 3:
            for one in model:  # one of them is trained
                one.first.weight.data[5, 2] += 1e-6

    half_job(model=made, callbacks=[meddle]).run(out=tmp_path / "run", progress=False, checkpoint_every=4)
    failed = [event for event in told if isinstance(event, CheckpointFailed)]
    assert len(failed) == 1
    assert "'first.weight' changed, which is not trained" in failed[0].message
    assert left_out(tmp_path / "run") == {"first.bias"}
    loaded: Any = half_job().load_model(tmp_path / "run")
    begun: Any = half_job().build_model()
    begun.first.weight.data[5, 2] += 1e-6
    assert torch.equal(loaded.first.weight, begun.first.weight)
