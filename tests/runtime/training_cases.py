"""The jobs and plans of `training_ranks.py`, and what is looked at when they are done."""

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from atoll import Job
from atoll.script import load_job

EXAMPLES = Path(__file__).parents[2] / "examples"
PIPE, SHARDED, TENSOR, UNEQUAL = "2 | a=4 | b=4", "4 | sharded: (a b)=2,2", "4 | tensor=2: (a b)=4", "2 | a=3 b=1"
STEPS, BATCH, VOCABULARY, LENGTH = 4, 4, 32, 8


@dataclass(frozen=True)
class Case:
    """A job under plans, one after another: all but the last stop half way."""

    name: str
    job: Job
    plans: tuple[str, ...]
    look: Callable[[Any], dict[str, Any]] = lambda session: {}

    def job_of(self, number: int) -> Job:
        """The job as it is under the n-th plan."""
        last = number == len(self.plans) - 1
        return self.job if last else dataclasses.replace(self.job, steps=self.job.total_steps // 2)


class Tokens:
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))


def loss(model: Any, batch: Tensor) -> Tensor:
    result: Tensor = model(input_ids=batch, labels=batch).loss
    return result


def gpt2_config() -> Any:
    from transformers import GPT2Config

    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": VOCABULARY, "n_positions": LENGTH}
    return GPT2Config(**sizes, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, use_cache=False, bos_token_id=1, eos_token_id=2)


def gpt2() -> nn.Module:
    from transformers import GPT2LMHeadModel

    return GPT2LMHeadModel(gpt2_config())


def lora_gpt2() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(gpt2(), LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True))


adam = partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)


def small_job(model: Callable[[], nn.Module] = gpt2, **given: Any) -> Job:
    settings: dict[str, Any] = {"optimizer": adam, "batch_size": BATCH, "steps": STEPS, "data": Tokens(), "loss": loss}
    return Job(model=model, **settings | given)


def pretrained(folder: Path) -> Path:
    """A Hugging Face directory as transformers writes it, in two files; other weights than any job would begin with."""
    if not (folder / "config.json").exists():
        torch.manual_seed(99)
        gpt2().save_pretrained(folder, max_shard_size="10KB")  # type: ignore[operator]
    return folder


def example(name: str, **given: Any) -> Job:
    """One of the examples with a smaller model and shorter samples."""
    job = load_job(EXAMPLES / f"{name}.py")
    config = cast(Any, job.model).__globals__["CONFIG"]
    config.num_hidden_layers, config.hidden_size, config.intermediate_size = 2, 32, 48
    data = [tuple(part[:16] for part in job.dataset[i]) for i in range(12)]
    return dataclasses.replace(job, **{"steps": STEPS, "batch_size": BATCH, "micro_batch_size": 2, "data": data} | given)


def CASES(folder: Path) -> list[Case]:  # noqa: N802
    """What is run, in order."""
    lora, weights = example("lora"), small_job(weights=pretrained(folder / "pretrained"))
    adapter = small_job(lora_gpt2, weights=pretrained(folder / "pretrained"))
    return [
        Case("lora", lora, (PIPE, SHARDED)),
        *(Case(f"weights {number}", weights, (plan,), what_is_held) for number, plan in enumerate((PIPE, SHARDED, TENSOR))),
        *(Case(f"adapter {number}", adapter, (plan,)) for number, plan in enumerate((PIPE, SHARDED))),
    ]


def what_is_held(session: Any) -> dict[str, Any]:
    """How many numbers of the model are in this rank's memory."""
    return {"held": sum(part.leaf.numel() for part in session.work.owned)}
