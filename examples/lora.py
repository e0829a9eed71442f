"""LoRA: only small adapters of a Hugging Face model are trained, and exported for `peft` to load.

pip install "atoll[hf]"
python examples/lora.py                        trains here, alone, in half a minute
atoll run examples/lora.py --cluster c.toml --out RUN
                                               trains on the devices that c.toml names; --alone instead: here, in one process
atoll export RUN --to adapter                  an adapter for peft.PeftModel.from_pretrained; --merge: the whole model

The model that is adapted is made here from a configuration. For a real one give its directory, `Job(weights="…")`: every process then
reads only the part of it that it trains, and none needs memory for a whole copy.
"""

from functools import partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import atoll
from atoll.data import StandardLibraryText

CONFIG = LlamaConfig(
    vocab_size=StandardLibraryText.vocabulary,
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    use_cache=False,
)
ADAPTER = LoraConfig(
    task_type="CAUSAL_LM", r=8, lora_alpha=16, lora_dropout=0.05, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]
)


def model() -> nn.Module:
    base: Any = LlamaForCausalLM
    return get_peft_model(base(CONFIG), ADAPTER)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, _ = batch
    result: Tensor = model(input_ids=inputs, labels=inputs).loss  # the model shifts the labels itself
    return result


job = atoll.Job(
    name="adapter",
    model=model,
    loss=loss,
    data=partial(StandardLibraryText, sequence_length=128),
    optimizer=partial(torch.optim.AdamW, lr=2e-3),
    max_grad_norm=1.0,
    batch_size=16,
    steps=100,
)

if __name__ == "__main__":
    job.run()
