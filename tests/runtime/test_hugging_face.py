"""In and out of Hugging Face's formats: what `peft` and `from_pretrained` load is what was trained; a directory is read by slices."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from atoll.cli.main import run as atoll
from atoll.errors import JobError
from atoll.graph.capture import capture_program
from atoll.runtime.modes.swarm.compute import DividedJob, StageCompute
from atoll.weights import InitialWeights, without_memory

from .training_cases import STEPS, Net, adam, example, gpt2, gpt2_config, lora_gpt2, loss, net_job, pretrained, small_job

pytestmark = pytest.mark.timeout(600)
TOLERANCE = 1e-5
RANKS = "hugging face"  # cases of training_cases.py, which the fixture `ranks` runs


@pytest.fixture(autouse=True)
def constructors_noted() -> None:
    """As in checkpoint/test_export.py."""
    with torch.device("meta"):
        torch.empty(0)


def plain_loop(model: nn.Module, job: Any) -> list[float]:
    """Training as anyone would write it."""
    model.train()
    optimizer = adam([parameter for parameter in model.parameters() if parameter.requires_grad])
    losses = []
    for step in range(STEPS):
        found = loss(model, job.samples.batch(step))
        optimizer.zero_grad()
        found.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(found.detach()))
    return losses


def same(own: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 0.0) -> bool:
    return own.keys() == other.keys() and all(torch.allclose(own[name], other[name], rtol=tolerance, atol=tolerance) for name in own)


def test_an_adapter_is_exported_as_peft_has_it(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = example("lora", store_frozen=True).run(out=tmp_path / "run", progress=False).model  # no script makes this very model
    model.save_pretrained(tmp_path / "peft")
    assert atoll(["export", str(tmp_path / "run"), "--to", str(tmp_path / "adapter")]) == 0
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert same(load_file(tmp_path / "adapter/adapter_model.safetensors"), load_file(tmp_path / "peft/adapter_model.safetensors"))
    ours, theirs = (json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("adapter", "peft"))
    for config in (ours, theirs):
        config["target_modules"].sort()  # peft has them in a set
    assert ours == theirs

    base = type(model.get_base_model())(model.get_base_model().config)
    clean = {name: value for name, value in model.get_base_model().state_dict().items() if "lora_" not in name and "modules_to" not in name}
    base.load_state_dict({name.replace(".base_layer", "").replace(".original_module", ""): value for name, value in clean.items()})
    tokens = torch.arange(12)[None]
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model.eval()(tokens).logits)

    assert atoll(["export", str(tmp_path / "run"), "--to", str(tmp_path / "merged"), "--merge"]) == 0
    merged, report = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(report.values())
    with torch.no_grad():
        assert torch.allclose(merged.eval()(tokens).logits, model(tokens).logits, atol=1e-5)


def test_a_whole_model_is_a_directory_that_from_pretrained_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, GPT2LMHeadModel

    model: Any = small_job().run(out=tmp_path / "run", progress=False).model
    model.save_pretrained(tmp_path / "theirs")
    assert atoll(["export", str(tmp_path / "run"), "--to", str(tmp_path / "ours")]) == 0
    assert {path.name for path in (tmp_path / "ours").iterdir()} == {path.name for path in (tmp_path / "theirs").iterdir()}
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    assert type(loaded) is GPT2LMHeadModel
    assert same(dict(loaded.state_dict()), dict(model.state_dict()))
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert loaded.generation_config.to_dict() == model.generation_config.to_dict()
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("ours", "theirs")]
    assert configs[0].keys() | {"dtype"} == configs[1].keys() | {"dtype"}
    assert atoll(["export", str(tmp_path / "run"), "--to", str(tmp_path / "x"), "--merge"]) == 2


def test_ranks_read_their_part_of_a_directory(ranks: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    folder, found = ranks
    job = small_job(weights=pretrained(folder / "pretrained"))
    expected = plain_loop(GPT2LMHeadModel.from_pretrained(folder / "pretrained"), job)
    assert job.run(progress=False).losses == pytest.approx(expected, rel=1e-6)
    parameters = sum(parameter.numel() for parameter in gpt2().parameters())
    for number in range(3):
        for rank in found:
            assert rank[f"weights {number}"]["losses"] == pytest.approx(expected, rel=TOLERANCE)
    assert found[0]["weights 1"]["held"] < 0.6 * parameters, "sharded"


def test_an_adapter_is_trained_on_a_directory(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2LMHeadModel

    folder, found = ranks
    job = small_job(lora_gpt2, weights=pretrained(folder / "pretrained"))
    model = get_peft_model(
        GPT2LMHeadModel.from_pretrained(folder / "pretrained"),
        LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True),
    )
    begun = job.build_model().state_dict()  # the adapter begins as the job's seed has it
    model.load_state_dict({name: value for name, value in begun.items() if "lora_" in name}, strict=False)
    expected = plain_loop(model, job)
    assert job.run(progress=False).losses == pytest.approx(expected, rel=1e-6)
    for number in range(2):
        assert found[0][f"adapter {number}"]["losses"] == pytest.approx(expected, rel=TOLERANCE)


def test_the_example_is_trained_by_two_and_resumed_under_another_plan(ranks: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder, found = ranks
    alone = example("lora").run(progress=False)
    assert found[0]["lora"]["losses"] == found[1]["lora"]["losses"] == pytest.approx(alone.losses, rel=TOLERANCE)
    assert atoll(["export", str(folder / "lora"), "--to", str(tmp_path / "adapter")]) == 0
    model: Any = alone.model
    base = AutoModelForCausalLM.from_config(model.get_base_model().config)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
    trained = {name: value for name, value in model.state_dict().items() if "lora_" in name or "modules_to_save" in name}
    assert same({name: loaded.state_dict()[name] for name in trained}, trained, TOLERANCE)


def test_a_model_without_memory_of_its_own_draws_what_a_whole_one_does(tmp_path: Path) -> None:
    source = InitialWeights(pretrained(tmp_path))
    job = small_job(lora_gpt2, weights=tmp_path)
    model, matched = without_memory(job._made, source.match)
    whole = job.build_model()
    stored = {name: value for name, value in model.named_parameters() if name in matched.names}
    memory = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in stored.values()}
    assert sum(memory.values()) < 0.6 * sum(value.nbytes for value in stored.values())
    assert set(matched.missing) == {name for name in whole.state_dict() if "lora_" in name}
    assert all(torch.equal(model.state_dict()[name], whole.state_dict()[name]) for name in matched.missing)
    assert model.get_parameter("base_model.model.lm_head.weight") is model.get_parameter("base_model.model.transformer.wte.weight")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_embd": 24}, r"has the shape \[\d+, 16\] there and \[\d+, 24\] in the model"),
        ({"n_layer": 3}, r"does not have 'transformer.h.2.ln_1.weight' and 11 more"),
    ],
)
def test_a_directory_of_another_model_is_refused(tmp_path: Path, change: dict[str, int], message: str) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    job = small_job(lambda: GPT2LMHeadModel(GPT2Config(**{**gpt2_config().to_dict(), **change})), weights=pretrained(tmp_path))
    with pytest.raises(JobError, match=message):
        job.run(progress=False)


def test_a_new_head_keeps_what_it_begins_with_and_that_is_told(tmp_path: Path) -> None:
    from transformers import GPT2ForSequenceClassification

    told: list[Any] = []

    def classified(model: Any, batch: Tensor) -> Tensor:
        result: Tensor = model(input_ids=batch, labels=batch[:, 0] % 2).loss
        return result

    config = gpt2_config()
    config.pad_token_id = 0
    given: dict[str, Any] = {"loss": classified, "weights": pretrained(tmp_path), "steps": 1, "callbacks": [told.append]}
    small_job(lambda: GPT2ForSequenceClassification(config), **given).run(progress=False)
    notes = [event.message for event in told if event.kind == "note"]
    assert len(notes) == 1
    assert "score.weight" in notes[0]


def test_a_swarms_stage_reads_its_part_of_a_file(tmp_path: Path) -> None:
    torch.manual_seed(5)
    other = Net()
    save_file(dict(other.state_dict()), tmp_path / "net.safetensors")
    job = net_job(weights=tmp_path / "net.safetensors")
    captured = capture_program(job, divided=True)
    layers = len(captured.graph.layers)
    divided = DividedJob(job, captured, [0, layers - 1, layers], [(0, 2), (2, 4)], threading.Lock())
    found: dict[str, Tensor] = {}
    for stage in range(2):
        compute = StageCompute(divided)
        found |= {part.name: part.tensor.detach() for part in asyncio.run(compute.initial(stage)).executor.shards()}
        compute.close()
    assert same(found, dict(other.state_dict()))
