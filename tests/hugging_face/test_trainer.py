"""A `transformers.Trainer` as a Job: the losses and weights of its own `train()`, in one process and in several."""

import math
import os
import runpy
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import nn
from transformers import (
    DataCollatorForLanguageModeling,
    EarlyStoppingCallback,
    LlamaForCausalLM,
    Trainer,
    default_data_collator,
    get_linear_schedule_with_warmup,
)

import atoll
from atoll.errors import JobError
from atoll.events import Evaluated, Logged, RunStarted, StepFinished, read_events
from atoll.plan.text import parse_plan
from atoll.runtime.checkpoint.export import export
from atoll.script import load_job, load_script
from tests.hugging_face.trainers import Sentences, assert_same_weights, classifier, language_model, made, tokenizer, told
from tests.process_group import fork_ranks

PIPELINE = """plan v1 graph=LlamaForCausalLM cluster=two mode=lockstep schedule=1f1b batch=16 micro_batch=4
stage 0: layers 0-0: oslo/0=16
stage 1: layers 1-1: rome/0=16
"""
SGD = {"optim": "sgd", "learning_rate": 0.1}


class Doubled(Trainer):
    def compute_loss(self, *arguments: Any, **more: Any) -> Any:
        return 2 * super().compute_loss(*arguments, **more)  # type: ignore[no-untyped-call]


def summed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_items_in_batch


@pytest.mark.parametrize(
    "arguments",
    [
        {"learning_rate": 1e-2, "max_grad_norm": 0.5, "weight_decay": 0.1, "adam_epsilon": 1e-3, "warmup_steps": 3},
        {**SGD, "gradient_accumulation_steps": 3, "lr_scheduler_type": "cosine", "warmup_steps": 1, "label_smoothing_factor": 0.1},
        {**SGD, "gradient_accumulation_steps": 2, "dataloader_drop_last": True, "data_seed": 5, "max_grad_norm": 0.0},
        {"optim": "adafactor", "learning_rate": 1e-2, "max_steps": 8, "kind": Doubled, "lr_scheduler_type": "constant"},
        {**SGD, "gradient_accumulation_steps": 2, "compute_loss_func": summed, "train_sampling_strategy": "sequential"},
        {"model": classifier, **SGD, "bf16": True, "seed": 3, "num_train_epochs": 1.5},
    ],
    ids=["weight decay", "accumulation", "drop_last", "compute_loss", "compute_loss_func", "classification in bf16"],
)
def test_one_process_trains_as_the_trainer_does(arguments: dict[str, Any], tmp_path: Path) -> None:
    """Epochs of 23 samples end with a smaller step, so with blanks; padding differs from batch to batch."""
    build = arguments.get("model", language_model)
    theirs, ours = (made(tmp_path, **{**arguments, "model": build()}) for _ in range(2))
    theirs.train()
    result = atoll.from_trainer(ours).run(progress=False, device="cpu")
    for name in ("loss", "learning_rate", "grad_norm", "epoch")[: 4 if arguments.get("max_grad_norm", 1) else 2]:
        assert told(ours).logged(name)[:-1] == pytest.approx(told(theirs).logged(name)[:-1], rel=2e-5), name
    assert len(result.losses) == theirs.state.global_step
    assert_same_weights(ours.model.state_dict(), theirs.model.state_dict())


def test_an_optimizer_and_a_schedule_that_are_given_are_built_anew(tmp_path: Path) -> None:
    trainers = []
    for _ in range(2):
        model = language_model()
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.3},
            {"params": [p for p in model.parameters() if p.dim() < 2], "lr": 0.01},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        trainers.append(made(tmp_path, model=model, optimizers=(optimizer, get_linear_schedule_with_warmup(optimizer, 2, 12))))
    theirs, ours = trainers
    theirs.train()
    atoll.from_trainer(ours).run(progress=False, device="cpu")
    assert told(ours).logged("loss") == pytest.approx(told(theirs).logged("loss"), rel=1e-5)
    assert_same_weights(ours.model.state_dict(), theirs.model.state_dict())


def accuracy(predictions: Any) -> dict[str, float]:
    return {"accuracy": float((predictions.predictions.argmax(-1) == predictions.label_ids).mean())}


def test_metrics_the_best_model_and_early_stopping_are_the_trainers(tmp_path: Path) -> None:
    """In the order in which the Trainer calls its callbacks, to the end."""
    about: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "metric_for_best_model": "accuracy",
        "load_best_model_at_end": True,
        "num_train_epochs": 4,
        "logging_steps": 3,
        "learning_rate": 3e-2,
        "adam_epsilon": 1e-3,
    }
    trainers = []
    for folder in ("theirs", "ours"):
        more = {"eval_dataset": Sentences(99, 10, kinds=3), "compute_metrics": accuracy, "callbacks": [EarlyStoppingCallback(4)]}
        trainers.append(made(tmp_path / folder, model=classifier(), save_strategy="steps", **about, **more))
    theirs, ours = trainers
    theirs.train()
    result = atoll.from_trainer(ours).run(progress=False, device="cpu")
    assert result.reason == "stopped"
    assert told(ours).calls == told(theirs).calls
    for name in ("loss", "eval_accuracy", "eval_loss", "train_loss"):
        assert told(ours).logged(name) == pytest.approx(told(theirs).logged(name), rel=1e-4), name
    assert (ours.state.best_global_step, ours.state.best_metric) == (theirs.state.best_global_step, theirs.state.best_metric)
    assert ours.state.best_global_step != ours.state.global_step
    assert_same_weights(ours.model.state_dict(), theirs.model.state_dict())


def test_metrics_are_of_the_weights_of_the_run_wherever_those_are(tmp_path: Path) -> None:
    """Also where one device has the whole model, but not the Trainer's own module."""

    class Elsewhere:
        logged: ClassVar[dict[str, float]] = {}
        step = 1

        def snapshot(self) -> atoll.Snapshot:
            return atoll.Snapshot(1, {name: torch.zeros_like(value) for name, value in language_model().state_dict().items()}, {})

        def log(self, **numbers: float) -> None:
            self.logged.update(numbers)

        def keep(self, name: str = "best") -> None:
            raise AssertionError

    about: dict[str, Any] = {"eval_strategy": "epoch", "eval_dataset": Sentences(99, 6)}
    trainer = made(tmp_path, compute_metrics=lambda found: {"largest": found.predictions.max()}, **about)
    (observer,) = atoll.from_trainer(trainer).callbacks
    start = {"mode": "lockstep", "steps": 12, "batch_size": 4, "samples": 23, "parameters": 1, "precision": "fp32", "seed": 0}
    cast(Any, observer)(RunStarted(name="job", devices=("here",), unix_seconds=0.0, **start), Elsewhere())
    cast(Any, observer)(Evaluated(step=6, loss=1.0, metrics={}, samples=6, seconds=0.1), Elsewhere())
    assert Elsewhere.logged == {"eval_loss": pytest.approx(math.log(32)), "eval_largest": 0.0}


LESS = {
    '"train", 1000': '"train", 40',  # three steps an epoch, the last one of eight samples
    '"eval", 64': '"eval", 6',
    "logging_steps=20": "logging_steps=1",
    "num_hidden_layers=2": "num_hidden_layers=1",
    "report_to=[]": "report_to=[], use_cpu=True",
    "weight_decay=0.01": "weight_decay=0.01, adam_epsilon=1e-3",
}


def rank_of_two(rank: int, port: int, script: Path, run: Path) -> None:
    torch.set_num_threads(1)
    job = replace(load_job(script), steps=4)
    role = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in role.items()})
    job.run(progress=False, plan=parse_plan(PIPELINE), out=run)


def test_the_example_in_two_stages_then_alone_is_what_its_trainer_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses of every step, metrics of every evaluation and weights, with blanks, over a change of plan."""
    monkeypatch.setattr("sys.argv", ["train.py"])
    text = (Path(__file__).parents[2] / "examples" / "hf_trainer.py").read_text(encoding="utf-8")
    for much, little in LESS.items():
        assert much in text
        text = text.replace(much, little)
    script = tmp_path / "train.py"
    script.write_text(text, encoding="utf-8")
    theirs = runpy.run_path(str(script), run_name="__main__")["trainer"]
    logged = {name: [log[name] for log in theirs.state.log_history if name in log] for name in ("loss", "eval_loss", "eval_bits_per_byte")}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert fork_ranks(2, rank_of_two, port, script, tmp_path / "run") == 0
    load_job(script).run(resume=tmp_path / "run", progress=False, device="cpu")
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    assert [event.loss for event in events if isinstance(event, StepFinished)] == pytest.approx(logged["loss"], rel=1e-5)
    found = [event.numbers for event in events if isinstance(event, Logged) and event.step in (3, 6)]
    for name in ("eval_loss", "eval_bits_per_byte"):
        assert [numbers[name] for numbers in found] == pytest.approx(logged[name], rel=1e-5), name
    export(tmp_path / "run", tmp_path / "model")
    assert_same_weights(LlamaForCausalLM.from_pretrained(tmp_path / "model").state_dict(), theirs.model.state_dict())


def test_what_cannot_be_as_in_the_trainer_is_told(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="DataCollatorForLanguageModeling draws random numbers"):
        masked = atoll.from_trainer(made(tmp_path, data_collator=DataCollatorForLanguageModeling(tokenizer(), mlm_probability=0.3)))
    whole, part = masked.samples.batch(0), masked.samples.batch(0, 2, 4)  # a piece of a batch has the same masks, and less padding
    length = part["input_ids"].shape[1]
    assert all(torch.equal(whole[name][2:, :length], part[name]) for name in ("input_ids", "labels", "attention_mask"))
    assert set(whole["labels"].unique().tolist()) > {-100}
    with pytest.warns(UserWarning, match="the sampler draws from PyTorch's global generator"):
        atoll.from_trainer(made(tmp_path, train_sampling_strategy="group_by_length"))

    class Regression(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(1, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.linear(x) - labels).square().mean()}

    rows = [{"x": [float(x)], "labels": [2.0 * x]} for x in range(10)]
    with pytest.warns(UserWarning, match="an epoch has 10 samples, no multiple of 4"):
        job = atoll.from_trainer(made(tmp_path, model=Regression(), train_dataset=rows, data_collator=default_data_collator))
    assert job.total_steps == 6  # as many as the Trainer makes


def test_a_script_that_ends_in_train_is_found_without_training(tmp_path: Path) -> None:
    """It may be all in a function, and the Trainer's own checkpoints are not gone on with."""
    script = (
        "import atoll, pathlib\nfrom tests.hugging_face.trainers import made\n"
        "def main():\n    trainer = made(pathlib.Path('.'))\n    atoll.from_trainer(trainer)\n    trainer.train({})\n"
        "    raise SystemExit('it trained')\n"
        "if __name__ == '__main__':\n    main()\n"
    )
    (tmp_path / "train.py").write_text(script.format(""))
    found = load_script(tmp_path / "train.py")
    assert (found.own_loop, found.job.batch_size, found.job.total_steps) == (False, 4, 12)
    (tmp_path / "train.py").write_text(script.format("resume_from_checkpoint=True"))
    with pytest.raises(JobError, match=r"trainer\.train\(resume_from_checkpoint=…\): a Trainer's checkpoint is not gone on with"):
        load_script(tmp_path / "train.py")
