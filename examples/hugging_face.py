"""A Hugging Face model, unchanged: a small Llama built from a configuration learns to write Python, byte by byte.

pip install "atoll[hf]"
python examples/hugging_face.py                trains here, alone, in about a minute
"""

from functools import partial

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

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


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, _ = batch
    result: Tensor = model(input_ids=inputs, labels=inputs).loss  # the model shifts the labels itself
    return result


job = atoll.Job(
    name="small llama",
    model=partial(AutoModelForCausalLM.from_config, CONFIG),
    loss=loss,
    data=partial(StandardLibraryText, sequence_length=128),
    optimizer=partial(torch.optim.AdamW, lr=2e-3),
    max_grad_norm=1.0,
    batch_size=16,
    steps=200,
)

if __name__ == "__main__":
    job.run()
