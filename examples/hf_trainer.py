"""A script as it is written for `transformers.Trainer`, with one line more: a small Llama learns to write Python, byte by byte.

pip install "atoll[hf]"
python examples/hf_trainer.py                  trains with the Trainer itself, in a minute or two
atoll run examples/hf_trainer.py --cluster examples/clusters/laptop.toml --out runs/hf
                                               trains the same on whatever devices there are: the same losses, to float tolerance
atoll export runs/hf --to model                a directory that `from_pretrained` loads
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import atoll
from atoll.data import StandardLibraryText


class Text:
    """Samples as the Trainer wants them."""

    def __init__(self, split: str, count: int) -> None:
        self.text = StandardLibraryText(sequence_length=64, split="train" if split == "train" else "eval")
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens, _ = self.text[index]
        return {"input_ids": tokens, "labels": tokens}  # the model shifts the labels itself


class Speaking(TrainerCallback):
    """Callbacks work as they do with the Trainer."""

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, float] | None = None, **more: Any
    ) -> None:
        """Show the mean loss since the last time."""
        if logs and "loss" in logs:
            print(f"step {state.global_step} of {state.max_steps}: loss {logs['loss']:.3f}")


def bits_per_byte(found: Any) -> dict[str, float]:
    """`compute_metrics`: all predictions on the evaluation data, in one place."""
    logits, labels = torch.from_numpy(found.predictions)[:, :-1], torch.from_numpy(found.label_ids)[:, 1:]
    return {"bits_per_byte": float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())) / 0.6931}


torch.manual_seed(0)
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4)
trainer = Trainer(
    model=AutoModelForCausalLM.from_config(config),  # type: ignore[no-untyped-call]
    args=TrainingArguments(
        output_dir="runs/hf_trainer",
        per_device_train_batch_size=16,
        num_train_epochs=2,
        learning_rate=3e-3,
        weight_decay=0.01,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        logging_steps=20,
        eval_strategy="epoch",
        metric_for_best_model="bits_per_byte",
        greater_is_better=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=Text("train", 1000),
    eval_dataset=Text("eval", 64),
    compute_metrics=bits_per_byte,
    callbacks=[Speaking()],
)
job = atoll.from_trainer(trainer)  # the one line more: `atoll plan` and `atoll run` train this

if __name__ == "__main__":
    trainer.train()
