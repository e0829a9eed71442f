"""Every argument of a Trainer is carried, without effect, or refused by its name."""

import dataclasses
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback, TrainingArguments

import atoll
from atoll.errors import JobError
from atoll.hugging_face.arguments import CARRIED, REFUSED, WITHOUT_EFFECT, refused_arguments
from tests.hugging_face.trainers import Sentences, language_model, made


def test_every_argument_is_carried_or_without_effect_or_refused() -> None:
    known = [*CARRIED, *WITHOUT_EFFECT, *REFUSED]
    assert sorted(known) == sorted(field.name for field in dataclasses.fields(TrainingArguments))


def test_defaults_are_not_refused_and_what_is_not_known_is(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Newer(TrainingArguments):
        sharpness: float = 0.0

    assert list(refused_arguments(TrainingArguments(output_dir=str(tmp_path)))) == []
    assert list(refused_arguments(Newer(output_dir=str(tmp_path)))) == []
    ((name, why),) = refused_arguments(Newer(output_dir=str(tmp_path), sharpness=0.5))
    assert (name, why[:35]) == ("sharpness", "Atoll does not know this argument, ")


class OwnStep(Trainer):
    def training_step(self, *arguments: Any, **more: Any) -> Any:
        return super().training_step(*arguments, **more)


class Mean(Trainer):
    def compute_loss(self, model: Any, inputs: Any, **more: Any) -> Any:
        return model(**inputs).loss


class Clipping(TrainerCallback):
    def on_pre_optimizer_step(self, *arguments: Any, **more: Any) -> None:
        pass


EVALUATED = {"eval_strategy": "epoch", "eval_dataset": Sentences(99, 6)}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"kind": OwnStep}, "training_step: OwnStep has its own"),
        ({"kind": Mean, "gradient_accumulation_steps": 2}, "gradient_accumulation_steps: the loss is not divided by num_items_in_batch"),
        ({"callbacks": [Clipping()]}, "callbacks: Clipping.on_pre_optimizer_step would never be called"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha: its noise is added by a hook"),
        ({"accelerator_config": {"use_seedable_sampler": False}}, "accelerator_config: settings of Accelerate"),
        ({"dataloader_in_order": False}, "dataloader_in_order: batches are always in order"),
        ({"eval_on_start": True, **EVALUATED}, "eval_on_start: evaluations follow steps"),
        ({"eval_strategy": "epoch", "eval_dataset": {"a": Sentences(), "b": Sentences()}}, "eval_dataset: several data sets"),
        ({"data_collator": DataCollatorWithFlattening()}, "data_collator: packing"),
        ({"lr_scheduler_type": "greedy", **EVALUATED}, "lr_scheduler_type: greedy must be told"),
        ({"resume_from_checkpoint": "there"}, "resume_from_checkpoint: a Trainer's checkpoint is not gone on with"),
    ],
    ids=lambda value: value.partition(":")[0] if isinstance(value, str) else "",
)
def test_what_a_job_cannot_carry_is_refused_by_name(arguments: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(JobError) as refused:
        atoll.from_trainer(made(tmp_path, **arguments))
    assert sentence in str(refused.value)


def test_torch_compile_is_the_jobs_own(tmp_path: Path) -> None:
    with mock.patch.dict(os.environ):  # where the arguments leave it for Accelerate
        job = atoll.from_trainer(made(tmp_path, torch_compile_mode="default"))
    assert job.compile == {"backend": "inductor", "mode": "default"}


def test_a_schedule_that_cannot_be_made_anew_is_refused(tmp_path: Path) -> None:
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with pytest.raises(JobError, match="optimizers: the StepLR was made for an optimizer"):
        atoll.from_trainer(made(tmp_path, model=model, optimizers=(optimizer, schedule)))
