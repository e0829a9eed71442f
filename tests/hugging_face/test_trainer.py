"""A `transformers.Trainer` as a Job: the losses and weights of its own `train()`, in one process and in several."""

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import DataCollatorWithFlattening, GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import atoll
from atoll.errors import JobError
from atoll.events import StepFinished, read_events
from atoll.plan.text import parse_plan
from atoll.runtime.checkpoint.export import export
from atoll.script import load_script
from tests.process_group import fork_ranks

PIPELINE = """plan v1 graph=GPT2LMHeadModel cluster=two mode=lockstep schedule=1f1b batch=4 micro_batch=2
stage 0: layers 0-1: oslo/0=4
stage 1: layers 2-3: rome/0=4
"""

SAMPLES, LONGEST = 24, 10


class Sentences:
    """Rows of tokens of several lengths."""

    def __init__(self, first: int = 0, count: int = SAMPLES) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        draw = torch.Generator().manual_seed(self.first + index)
        length = int(torch.randint(4, LONGEST + 1, (), generator=draw))
        return {"input_ids": torch.randint(0, 32, (length,), generator=draw).tolist()}


def padded(samples: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """All rows as long as the longest that there is; padding has no label."""
    rows = [sample["input_ids"] for sample in samples]
    return {
        "input_ids": torch.tensor([row + [0] * (LONGEST - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (LONGEST - len(row)) for row in rows]),
        "labels": torch.tensor([row + [-100] * (LONGEST - len(row)) for row in rows]),
    }


class Remembering(TrainerCallback):  # type: ignore[misc]
    """What callbacks are told."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.logs: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.stop_at = stop_at

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.calls.append("begin")

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.calls.append(f"step {state.global_step} of {state.max_steps}")
        control.should_training_stop = control.should_training_stop or state.global_step == self.stop_at

    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.calls.append(f"epoch {state.epoch:g}")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        self.logs.append(dict(logs))

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.calls.append("end")


def made(folder: Path, *, kind: type[Trainer] = Trainer, model: nn.Module | None = None, callback: Any = None, **arguments: Any) -> Trainer:
    torch.manual_seed(7)
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=32, n_positions=LONGEST, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, **none)
    more = {name: arguments.pop(name) for name in ("eval_dataset", "compute_metrics", "data_collator", "optimizers") if name in arguments}
    settings = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "logging_steps": 1,
        "num_train_epochs": 2,
        "report_to": [],
        "use_cpu": True,
        **arguments,
    }
    args = TrainingArguments(output_dir=str(folder), save_strategy="no", disable_tqdm=True, **settings)
    return kind(
        model=model or GPT2LMHeadModel(config),
        args=args,
        train_dataset=Sentences(),
        callbacks=[callback or Remembering()],
        **{"data_collator": padded, **more},
    )


def trained(folder: Path, **arguments: Any) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """What the Trainer's own `train()` makes: weights, the loss of every step, and of every evaluation."""
    told = Remembering()
    trainer = made(folder, callback=told, **arguments)
    trainer.train()
    losses, evaluated = ([log[name] for log in told.logs if name in log] for name in ("loss", "eval_loss"))
    return dict(trainer.model.state_dict()), losses, evaluated


def assert_same_weights(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    """But for the biases of keys: their gradient is zero, and Adam makes steps of the rounding noise in it."""
    for name, value in ours.items():
        if not name.endswith("c_attn.bias"):
            torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    "arguments",
    [
        {"learning_rate": 1e-2, "max_grad_norm": 0.5, "eval_strategy": "epoch", "eval_dataset": Sentences(99, 6), "weight_decay": 0.1},
        {"gradient_accumulation_steps": 3, "lr_scheduler_type": "cosine", "warmup_steps": 1, "optim": "sgd", "label_smoothing_factor": 0.1},
    ],
    ids=["weight decay", "accumulation"],
)
def test_one_process_trains_as_the_trainer_does(arguments: dict[str, Any], tmp_path: Path) -> None:
    """Losses of every step, what is evaluated, and the weights in the end."""
    theirs, losses, evaluated = trained(tmp_path, **arguments)
    ours = made(tmp_path, **arguments)
    result = atoll.from_trainer(ours).run(progress=False, device="cpu")
    assert result.losses == pytest.approx(losses, rel=1e-5)
    assert [one.loss for one in result.evaluations] == pytest.approx(evaluated, rel=1e-5)
    assert_same_weights(ours.model.state_dict(), theirs)


def rank_of_two(rank: int, port: int, job: atoll.Job, plan: str | None, about: dict[str, str]) -> None:
    role = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in role.items()})
    torch.set_num_threads(1)
    job.run(progress=False, plan=parse_plan(plan) if plan is not None else None, **about)  # type: ignore[arg-type]


def test_in_stages_then_in_shares_of_the_batch_it_trains_as_the_trainer_does(tmp_path: Path) -> None:
    """A callback of the Trainer stops a pipeline of two after four steps; two others go on from there, each with half of every batch."""
    theirs, losses, _ = trained(tmp_path, weight_decay=0.1, learning_rate=1e-2)
    for stop_at, plan, about in ((4, PIPELINE, {"out": str(tmp_path / "run")}), (None, None, {"resume": str(tmp_path / "run")})):
        job = atoll.from_trainer(made(tmp_path, callback=Remembering(stop_at), weight_decay=0.1, learning_rate=1e-2))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        assert fork_ranks(2, rank_of_two, port, job, plan, about) == 0
    found = {event.step: event.loss for event in read_events(tmp_path / "run" / "events.jsonl") if isinstance(event, StepFinished)}
    assert list(found.values()) == pytest.approx(losses, rel=1e-5)
    export(tmp_path / "run", tmp_path / "model.safetensors")
    assert_same_weights(load_file(tmp_path / "model.safetensors"), theirs)


def test_callbacks_are_told_what_the_trainer_tells_them_and_may_stop_it(tmp_path: Path) -> None:
    told = Remembering(stop_at=7)
    result = atoll.from_trainer(made(tmp_path, callback=told, logging_steps=3)).run(progress=False, device="cpu")
    assert told.calls == ["begin", *[f"step {n} of 12" for n in range(1, 7)], "epoch 1", "step 7 of 12", "end"]
    assert [log["loss"] for log in told.logs] == pytest.approx([sum(result.losses[i : i + 3]) / 3 for i in (0, 3)])
    assert (result.reason, len(result.losses)) == ("stopped", 7)


class OwnStep(Trainer):  # type: ignore[misc]
    def training_step(self, *arguments: Any, **more: Any) -> Any:
        return super().training_step(*arguments, **more)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"kind": OwnStep}, "training_step: OwnStep has its own"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha: noise"),
        ({"eval_on_start": True, "eval_strategy": "epoch", "eval_dataset": Sentences(99, 6)}, "eval_on_start: evaluations follow steps"),
        ({"compute_metrics": lambda predictions: {}}, "compute_metrics: it wants all predictions"),
        ({"data_collator": DataCollatorWithFlattening()}, "data_collator: packing"),
    ],
)
def test_what_a_job_cannot_carry_is_refused_by_name(arguments: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=sentence):
        atoll.from_trainer(made(tmp_path, **arguments))


def test_batches_that_epochs_do_not_fill_are_told(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="an epoch has 24 samples, which is no multiple of 5"):
        job = atoll.from_trainer(made(tmp_path, per_device_train_batch_size=5))
    assert job.total_steps == 10  # as many as the Trainer makes


def test_a_script_that_ends_in_train_is_found_without_training(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import atoll, pathlib\nfrom tests.hugging_face.test_trainer import made\n"
        "if __name__ == '__main__':\n    trainer = made(pathlib.Path('.'))\n    atoll.from_trainer(trainer)\n    trainer.train()\n"
        "    raise SystemExit('it trained')\n"
    )
    found = load_script(tmp_path / "train.py")
    assert (found.own_loop, found.job.batch_size, found.job.total_steps) == (False, 4, 12)
