"""Jobs of different shapes for `benchmarks/local.py`: each takes a fraction of a second a step on one core, and none needs a download."""

import importlib
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

from atoll import Job
from atoll.script import load_job

__all__ = ["JOBS"]

_EXAMPLES = Path(__file__).parents[1] / "examples"
_STEPS = 1_000_000  # the benchmark stops earlier
_ADAMW = partial(torch.optim.AdamW, lr=1e-4)


class _Made:
    """Samples that were made beforehand, so that loading them costs next to nothing."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)


def _classes(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    return cross_entropy(model(inputs), labels)


def _job(name: str, model: Callable[[], nn.Module], loss: Any, data: _Made, batch_size: int, **more: Any) -> Job:
    torch.manual_seed(0)
    return Job(name=name, model=model, loss=loss, data=data, batch_size=batch_size, steps=_STEPS, **{"optimizer": _ADAMW, **more})


def _transformers() -> Any:
    """The library, loaded only for the models that need it."""
    return importlib.import_module("transformers")


def _mlp() -> Job:
    """Five wide layers: large products, and an optimizer with much to update."""
    sizes = (784, 2048, 2048, 2048, 1000)

    def build() -> nn.Module:
        layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*layers[:-1])

    return _job("wide MLP", build, _classes, _Made(torch.randn(512, 784), torch.randint(1000, (512,))), 256)


def _gpt2() -> Job:
    """Hugging Face's GPT-2 with dropout, its own attention and a tied vocabulary."""
    transformers = _transformers()
    config = transformers.GPT2Config(vocab_size=8192, n_positions=128, n_embd=256, n_layer=4, n_head=4, use_cache=False)

    def loss(model: Any, batch: tuple[Tensor]) -> Tensor:
        return model(input_ids=batch[0], labels=batch[0]).loss  # type: ignore[no-any-return]

    return _job("GPT-2", lambda: transformers.GPT2LMHeadModel(config), loss, _Made(torch.randint(8192, (64, 128))), 4, max_grad_norm=1.0)


def _bert() -> Job:
    """Hugging Face's BERT on long sequences, masks included."""
    transformers = _transformers()
    config = transformers.BertConfig(
        vocab_size=4096, hidden_size=192, num_hidden_layers=3, num_attention_heads=3, intermediate_size=768, max_position_embeddings=512
    )

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, mask = batch
        return model(input_ids=tokens, attention_mask=mask, labels=tokens).loss  # type: ignore[no-any-return]

    mask = (torch.arange(512) < torch.randint(400, 513, (32, 1))).long()
    return _job("BERT, long", lambda: transformers.BertForMaskedLM(config), loss, _Made(torch.randint(4096, (32, 512)), mask), 2)


class _Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions with batch norms, added to what came in."""

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * channels
        self.reduce, self.reduce_norm = nn.Conv2d(inputs, channels, 1, bias=False), nn.BatchNorm2d(channels)
        self.middle = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False)
        self.middle_norm = nn.BatchNorm2d(channels)
        self.expand, self.expand_norm = nn.Conv2d(channels, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs or stride > 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = relu(self.reduce_norm(self.reduce(x)))
        y = relu(self.middle_norm(self.middle(y)))
        return relu(self.expand_norm(self.expand(y)) + self.shortcut(x))


def _resnet() -> Job:
    """A residual network of bottlenecks in ResNet-50's manner, half as wide, on images of 96 pixels a side."""

    def build() -> nn.Module:
        stem = [nn.Conv2d(3, 32, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        shapes = [(32, 32, 1), (128, 32, 1), (128, 64, 2), (256, 64, 1), (256, 128, 2), (512, 128, 1)]
        blocks = nn.Sequential(*(_Bottleneck(*shape) for shape in shapes))
        return nn.Sequential(*stem, blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 100))

    sgd = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    data = _Made(torch.randn(64, 3, 96, 96), torch.randint(100, (64,)))
    return _job("ResNet", build, _classes, data, 16, optimizer=sgd)


def _vit() -> Job:
    """Hugging Face's vision transformer."""
    transformers = _transformers()
    config = transformers.ViTConfig(
        hidden_size=192, num_hidden_layers=4, num_attention_heads=3, intermediate_size=768, image_size=224, num_labels=100
    )

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(pixel_values=batch[0], labels=batch[1]).loss  # type: ignore[no-any-return]

    data = _Made(torch.randn(32, 3, 224, 224), torch.randint(100, (32,)))
    return _job("ViT", lambda: transformers.ViTForImageClassification(config), loss, data, 4)


class _Reader(nn.Module):
    """A two-layer LSTM that reads tokens and guesses the next."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(2000, 256)
        self.recurrent = nn.LSTM(256, 384, num_layers=2, batch_first=True)
        self.head = nn.Linear(384, 2000)

    def forward(self, text: Tensor) -> Tensor:
        out: Tensor = self.head(self.recurrent(self.words(text))[0])
        return out


def _next_token(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    tokens = batch[0]
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _lstm() -> Job:
    """Recurrence: many small products one after another."""
    return _job("LSTM", _Reader, _next_token, _Made(torch.randint(2000, (256, 49))), 16)


class _Bag(nn.Module):
    """A large table of words, averaged, then a small network and as large an output."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.hidden = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.head = nn.Linear(width, words)

    def forward(self, text: Tensor) -> Tensor:
        out: Tensor = self.head(self.hidden(self.words(text).mean(1)))
        return out


def _vocabulary() -> Job:
    """A large vocabulary: much of the step is the table's gradient, its optimizer and the softmax.

    Samples are long enough for the first steps to touch nearly every word, as training does before long.
    """
    words = 30_000
    data = _Made(torch.randint(words, (1024, 128)), torch.randint(words, (1024,)))
    return _job("large vocabulary", lambda: _Bag(words, 96), _classes, data, 128)


def _example(file: str) -> Job:
    if str(_EXAMPLES) not in sys.path:
        sys.path.insert(0, str(_EXAMPLES))  # examples import one another as scripts do
    return load_job(_EXAMPLES / file)


JOBS: dict[str, Callable[[], Job]] = {
    "mlp": _mlp,
    "decoder": lambda: _example("language_model.py"),
    "gpt2": _gpt2,
    "bert": _bert,
    "resnet": _resnet,
    "vit": _vit,
    "lstm": _lstm,
    "vocabulary": _vocabulary,
    "experts": lambda: _example("mixture_of_experts.py"),
}
