"""The jobs and plans of `training_ranks.py`, and what is looked at when they are done."""

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from atoll import BestCheckpoint, Job, RunHandle, Snapshot
from atoll.events import AnyEvent, Evaluated
from atoll.script import load_job

EXAMPLES = Path(__file__).parents[2] / "examples"
PIPE, SHARDED, TENSOR, UNEQUAL = "2 | a=4 | b=4", "4 | sharded: (a b)=2,2", "4 | tensor=2: (a b)=4", "2 | a=3 b=1"
STEPS, BATCH, VOCABULARY, LENGTH = 4, 4, 32, 8


class Net(nn.Module):
    """Two names of every kind that groups are made by; the last layer is not used before the third step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.norm = nn.LayerNorm(12)
        self.second = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.norm(self.first(x))))


class Points:
    def __init__(self, first: int = 0) -> None:
        self.first = first

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.first + index)
        return torch.randn(6, generator=generator), torch.randn(3, generator=generator)


def squares(model: nn.Module, batch: Any) -> Tensor:
    inputs, wanted = batch
    return ((model(inputs) - wanted) ** 2).mean()


def no_decay(name: str, parameter: nn.Parameter) -> dict[str, Any]:
    """As people write it: biases and norms do not decay."""
    return {"weight_decay": 0.0, "lr": 0.03} if parameter.dim() < 2 or "norm" in name else {}


class Watching:
    """A callback that asks for everything there is to ask for."""

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []

    def __call__(self, event: AnyEvent, run: RunHandle) -> None:
        if isinstance(event, Evaluated):
            self.snapshots.append(run.snapshot())
            run.log(double=2 * (event.loss or 0.0), seen=len(self.snapshots))


def net_job(**given: Any) -> Job:
    settings: dict[str, Any] = {
        "model": Net,
        "loss": squares,
        "data": Points(),
        "eval_data": Points(100),
        "eval_every": 1,
        "optimizer": partial(torch.optim.AdamW, lr=0.05, eps=1e-3, weight_decay=0.1),
        "parameter_groups": no_decay,
        "scheduler": partial(ReduceLROnPlateau, factor=0.5, patience=0, threshold=0.2),
        "ema_decay": 0.7,
        "eval_ema": True,
        "batch_size": BATCH,
        "steps": 8,
    }
    return Job(**settings | given)


def worst(model: nn.Module, batch: Any) -> float:
    """A plain number, which no captured program returns."""
    return float((model(batch[0]) - batch[1]).abs().max())


def near(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Asks the data how to go on: samples of large numbers are left out, if there are some."""
    inputs, wanted = batch
    large = inputs.abs().amax(1) > 2
    if bool(large.any()):
        inputs, wanted = inputs[~large], wanted[~large]
    return ((model(inputs) - wanted).abs().mean(1) < 1).sum(), torch.tensor(float(len(inputs)))


def measured_job() -> Job:
    """Trains captured, and is evaluated by functions that cannot be."""
    return net_job(ema_decay=None, eval_ema=False, eval_every=4, scheduler=None, metrics={"worst": worst, "near": near})


def bf16_job() -> Job:
    given: dict[str, Any] = {"precision": "bf16-true", "steps": STEPS, "optimizer": partial(torch.optim.SGD, lr=0.05, momentum=0.9)}
    return Job(model=Net, loss=squares, data=Points(), batch_size=BATCH, **given)


@dataclass(frozen=True)
class Case:
    """A job under plans, one after another: all but the last stop half way."""

    name: str
    job: Job
    plans: tuple[str, ...]
    look: Callable[[Any], dict[str, Any]] = lambda session: {}
    saved: bool = True  # in a directory

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


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH}
    return LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False))


def lora_llama(layers: tuple[int, ...] = (0, 1, 2, 3)) -> nn.Module:
    """Of whose 40,000 parameters a fortieth, or less, is trained: in these of its four layers."""
    from peft import LoraConfig, get_peft_model

    adapter = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"], layers_to_transform=list(layers))
    return get_peft_model(llama(), adapter)


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


def hugging_face_cases(folder: Path) -> list[Case]:
    """Weights from files and adapters, in order."""
    lora, weights = example("lora"), small_job(weights=pretrained(folder / "pretrained"))
    adapter = small_job(lora_gpt2, weights=pretrained(folder / "pretrained"))
    return [
        Case("lora", lora, (PIPE, SHARDED)),
        *(Case(f"weights {number}", weights, (plan,), what_is_held) for number, plan in enumerate((PIPE, SHARDED, TENSOR))),
        *(Case(f"adapter {number}", adapter, (plan,)) for number, plan in enumerate((PIPE, SHARDED))),
    ]


def own_cases(folder: Path) -> list[Case]:
    """What needs no library, in order."""
    return [
        *(Case(f"bf16 {number}", bf16_job(), (plan,), what_is_returned, saved=False) for number, plan in enumerate((PIPE, SHARDED))),
        Case("measured", measured_job(), (PIPE,), lambda session: {"evaluations": [e.metrics for e in session.evaluations]}),
        *(
            Case(f"net {number}", net_job(callbacks=[Watching(), BestCheckpoint()], compile=compile), plans, what_was_watched)
            for number, (plans, compile) in NETS
        ),
    ]


TWO = "2 | a=2 b=2"
FROZEN = {"all": (lora_llama, (TWO, PIPE, SHARDED, TENSOR)), "upper": (partial(lora_llama, (2, 3)), (PIPE, SHARDED, TENSOR))}


def frozen_cases(folder: Path) -> list[Case]:
    """Jobs that train adapters of all layers and of the upper ones, under one plan after another; and one that goes on under others."""
    found = []
    for name, (model, plans) in FROZEN.items():
        job = small_job(model)
        found += [Case(f"{name} {number}", job, (plan,), what_frozen_costs) for number, plan in enumerate(plans)]
    return [*found, Case("resumed", found[0].job, (SHARDED, PIPE), what_frozen_costs)]


def what_frozen_costs(session: Any) -> dict[str, Any]:
    """What a rank held, and exchanged in a step."""
    owned, optimizer = session.work.owned, session.work.turns[0].optimizer
    return {
        "parameters": 4 * sum(part.leaf.numel() for part in owned),
        "gradients": 4 * sum(part.source.numel() for part in owned if part.source.grad is not None and not part.sharded)
        + 4 * sum(part.leaf.numel() for part in owned if part.leaf.grad is not None and part.sharded),
        "optimizer": sum(value.nbytes for state in optimizer.state.values() for value in state.values() if value.dim()),
        "exchanges": [msgspec.to_builtins(exchange) for exchange in session.work.runner.recorder.exchanges],
    }


CASES = {"hugging face": hugging_face_cases, "own": own_cases, "frozen": frozen_cases}
NETS = tuple(enumerate([((PIPE, SHARDED), False), ((SHARDED, UNEQUAL), {"backend": "aot_eager"})]))


def what_is_returned(session: Any) -> dict[str, Any]:
    """What rank 0 of a run without a directory gives back."""
    model = session.result().model
    return {"weights": {name: value.float().tolist() for name, value in model.state_dict().items()} if model is not None else None}


def what_was_watched(session: Any) -> dict[str, Any]:
    """What callbacks on rank 0 saw, and how the run was evaluated."""
    snapshots = session.job.callbacks[0].snapshots
    last = snapshots[-1] if snapshots else None
    return {
        "evaluations": [event.loss for event in session.trainer.evaluations],
        "rate": [group["lr"] for group in session.trainer.optimizer.param_groups],
        "weights": {name: value.tolist() for name, value in last.model.items()} if last else {},
        "ema": {name: value.tolist() for name, value in last.ema.items()} if last else {},
        "moments": {name: state["exp_avg"].tolist() for name, state in last.optimizer.items()} if last else {},
    }


def what_is_held(session: Any) -> dict[str, Any]:
    """How many numbers of the model are in this rank's memory."""
    return {"held": sum(part.leaf.numel() for part in session.work.owned)}
