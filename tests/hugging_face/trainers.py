"""Trainers for tests: tiny models and tokenizers made in code, and what `train()` itself makes of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorForLanguageModeling,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

WORDS = 32


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"[PAD]": 0, "[MASK]": 1, **{f"w{number}": number for number in range(2, WORDS)}}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "[PAD]")), pad_token="[PAD]", mask_token="[MASK]")


class Sentences:
    """Rows of tokens of several lengths, with a label if there are kinds of them."""

    def __init__(self, first: int = 0, count: int = 23, kinds: int = 0) -> None:
        self.first, self.count, self.kinds = first, count, kinds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= self.count:
            raise IndexError(index)
        draw = torch.Generator().manual_seed(self.first + index)
        length = int(torch.randint(4, 11, (), generator=draw))
        tokens = torch.randint(2, WORDS, (length,), generator=draw).tolist()
        return {"input_ids": tokens} | ({"label": tokens[0] % self.kinds} if self.kinds else {})


def language_model() -> LlamaForCausalLM:
    torch.manual_seed(7)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "attention_bias": True}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=16, **sizes))


def classifier() -> BertForSequenceClassification:
    torch.manual_seed(7)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 3}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(vocab_size=WORDS, max_position_embeddings=16, **sizes, **none))  # type: ignore[no-untyped-call]


class Remembering(TrainerCallback):
    """What callbacks are told, in order."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.logs: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.stop_at = stop_at

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.calls.append(f"begin at {state.global_step} of {state.max_steps}, {state.num_train_epochs} epochs")

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.calls.append("epoch begins")

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.calls.append(f"step begins after {state.global_step}")

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.calls.append(f"step {state.global_step}")
        control.should_training_stop = control.should_training_stop or state.global_step == self.stop_at

    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.calls.append(f"epoch {state.epoch:.4f}")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        self.logs.append(dict(logs))
        self.calls.append(
            "log " + ", ".join(sorted({"loss", "learning_rate", "grad_norm", "eval_loss", "train_loss", "epoch"} & set(logs)))
        )

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **more: Any) -> None:
        self.calls.append(f"evaluated, best {state.best_global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.calls.append("end")

    def logged(self, name: str) -> list[float]:
        """That number wherever it was logged."""
        return [log[name] for log in self.logs if name in log]


_OF_THE_TRAINER = ("eval_dataset", "train_dataset", "compute_metrics", "data_collator", "optimizers", "compute_loss_func", "callbacks")


def made(folder: Path, *, kind: type[Trainer] = Trainer, model: Any = None, **arguments: Any) -> Trainer:
    """A Trainer of a language model, in batches of four, but for what is given otherwise; its callback remembers."""
    more = {name: arguments.pop(name) for name in _OF_THE_TRAINER if name in arguments}
    model = model or language_model()
    causal = isinstance(model, LlamaForCausalLM)
    given = {
        "train_dataset": Sentences(kinds=0 if causal else 3),
        "data_collator": DataCollatorForLanguageModeling(tokenizer(), mlm=False) if causal else None,
        "processing_class": None if causal else tokenizer(),
        **more,
        "callbacks": [Remembering(), *more.get("callbacks", [])],
    }
    settings = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "logging_steps": 1,
        "num_train_epochs": 2,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        **arguments,
    }
    return kind(model=model, args=TrainingArguments(output_dir=str(folder), **settings), **given)


def told(trainer: Trainer) -> Remembering:
    """What its callback was."""
    return next(callback for callback in trainer.callback_handler.callbacks if isinstance(callback, Remembering))


def assert_same_weights(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    """To float tolerance. Adam needs a larger `adam_epsilon` for that: biases of keys have next to no gradient, since softmax does not see
    what is added to all scores of a row, and Adam makes whole steps of the rounding noise in it."""
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")
