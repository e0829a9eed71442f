"""A script as it is written for `transformers.Trainer`, with one line more: a small GPT-2 learns to write Python, byte by byte.

pip install "atoll[hf]"
python examples/hf_trainer.py                  trains with the Trainer itself, in about a minute
atoll run examples/hf_trainer.py --cluster examples/clusters/laptop.toml
                                               trains the same on whatever devices there are: the same losses, to float tolerance
"""

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

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


class Speaking(TrainerCallback):  # type: ignore[misc]
    """Callbacks work as they do with the Trainer."""

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, float] | None = None, **more: object
    ) -> None:
        if logs and "loss" in logs:
            print(f"step {state.global_step} of {state.max_steps}: loss {logs['loss']:.3f}")


torch.manual_seed(0)
config = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM")
trainer = Trainer(
    model=GPT2LMHeadModel(config),
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
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=Text("train", 1024),
    eval_dataset=Text("eval", 64),
    callbacks=[Speaking()],
)
job = atoll.from_trainer(trainer)  # the one line more: `atoll plan` and `atoll run` train this

if __name__ == "__main__":
    trainer.train()
