"""Jobs of many kinds at tiny sizes: what plans are tried on."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR

sys.path.insert(0, str(Path(__file__).parents[4] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[3] / "graph"))

from captured_models import _GPT2, VOCABULARY, masked_tokens, own_loss, tiny, tokens

from atoll import Job
from atoll.data import Shapes, SortedDigits, StandardLibraryText

BATCH, STEPS, SAMPLES = 8, 10, 48

# Adam divides a gradient by its own size. Where the true gradient is zero (biases of attention keys) that size is rounding noise, and
# Adam would blow it up to steps as large as any; with this epsilon noise stays noise. For a like reason the models written here have smooth
# activations: a unit of ReLU that stands at zero but for rounding has one gradient or another, in one process as in several.
adam = partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)


class Rows:
    """A batch as data: one sample a row."""

    def __init__(self, batch: Mapping[str, Tensor]) -> None:
        self.batch, self.length = batch, len(next(iter(batch.values())))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[index] for name, values in self.batch.items()}


def rows(make: Callable[[int], Mapping[str, Tensor]], count: int = SAMPLES, seed: int = 7) -> Rows:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Rows(make(count))


def job(model: Callable[[], nn.Module], loss: Any = own_loss, data: Any = None, **given: Any) -> Job:
    settings: dict[str, Any] = {"optimizer": adam, "batch_size": BATCH, "steps": STEPS, "data": data or rows(tokens)}
    return Job(model=model, loss=loss, **settings | given)


def hugging_face(name: str, **given: Any) -> Job:
    known = tiny(name)
    return job(known.model, data=rows(known.batch), name=name, **given)


def gpt2(layers: int = 2, dropout: float = 0.0) -> nn.Module:
    import transformers

    drop = {"attn_pdrop": dropout, "embd_pdrop": dropout, "resid_pdrop": dropout}
    built: nn.Module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**_GPT2 | {"n_layer": layers} | drop))
    return built


def counted_loss(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A mean over some of the tokens: every sample weighs something else."""
    logits = model(input_ids=batch["input_ids"]).logits
    counted = (batch["labels"] % 3 != 0).flatten()
    losses = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    return (losses * counted).sum(), counted.sum()


def several_losses(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Means over different tokens, and a sum, as users write them: nothing is said of weights."""
    logits, labels = model(input_ids=batch["input_ids"]).logits.flatten(0, 1), batch["labels"].flatten()
    loss = cross_entropy(logits, labels.masked_fill(labels % 3 == 0, -100))
    loss += 0.5 * cross_entropy(logits, labels.masked_fill(labels % 5 == 0, -100), label_smoothing=0.1)
    return loss + 1e-4 * logits.pow(2).sum()


def accuracy(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return (model(input_ids=batch["input_ids"]).logits.argmax(-1) == batch["labels"]).float().mean()


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Each sample cut to a length of its own, then padded to the longest of its micro-batch: shapes differ from batch to batch.

    (Also between the two batches that capture looks at, with the seed that is used: a length it never saw change it takes as fixed.)
    """
    lengths = [4 + int(sample["input_ids"].sum()) % 9 for sample in samples]
    most = max(lengths)
    ids, labels, mask = torch.zeros(3, len(samples), most, dtype=torch.long).unbind(0)
    for row, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
        ids[row, :length], labels[row, :length] = sample["input_ids"][:length], sample["labels"][:length]
        mask[row, :length] = 1
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def padded_loss(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    counted = batch["attention_mask"].flatten()
    losses = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    return (losses * counted).sum(), counted.sum()


class Pairs(nn.Module):
    """PyTorch's own encoder and decoder."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 32)
        self.transformer = nn.Transformer(32, 4, 2, 2, 48, dropout=dropout, activation="gelu", batch_first=True)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        words = self.words(ids)
        return self.head(self.transformer(words, words))


def word_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].roll(1, 1).flatten())


def convolutions(norm: Callable[[int], nn.Module]) -> nn.Module:
    blocks = [nn.Sequential(nn.Conv2d(4 if i else 1, 4, 3, padding=1), norm(4), nn.GELU()) for i in range(4)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))


def pictures(count: int) -> dict[str, Tensor]:
    return {"image": torch.randn(count, 1, 8, 8), "label": torch.randint(0, 10, (count,))}


def picture_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy(model(batch["image"]), batch["label"])


def wide_classifier() -> nn.Module:
    """Many classes behind a small body."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 500))


class Adapted(nn.Module):
    """A frozen weight with a trained correction of low rank beside it."""

    def __init__(self, inner: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, inner.in_features) * 0.1)
        self.up = nn.Parameter(torch.randn(inner.out_features, rank) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x @ self.down.t() @ self.up.t()


def adapted_llama() -> nn.Module:
    model: Any = tiny("llama").model()
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj, layer.mlp.up_proj = Adapted(layer.self_attn.q_proj), Adapted(layer.mlp.up_proj)
    return model  # type: ignore[no-any-return]


class Idle(nn.Module):
    """A model with parameters that no forward reads, before and after those that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(3, 3)
        self.body = gpt2()
        self.neither = nn.Parameter(torch.ones(5))

    def forward(self, **batch: Tensor) -> Any:
        return self.body(**batch)


class Peculiar(nn.Module):
    """Parameters that are read and get no gradient, which weight decay must not touch, and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 24), nn.GELU(), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 10))
        self.shift = nn.Parameter(torch.full((64,), 0.3))
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, image: Tensor) -> Tensor:
        return self.body(image.flatten(1) + self.shift.detach()) * self.temperature


class Repeats(nn.Module):
    """One layer used three times, and a head tied to the table: shared in one stage or across several."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, activation="gelu", batch_first=True)
        self.other = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, activation="gelu", batch_first=True)
        self.head = nn.Linear(32, VOCABULARY, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.block(self.words(ids))
        return self.head(self.block(self.other(self.block(x))))


class Regions(nn.Module):
    """Draws and changes of buffers inside `no_grad` and `autocast`, a buffer that is assigned, and complex values between layers."""

    average: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, VOCABULARY)
        self.register_buffer("average", torch.ones(16))
        self.register_buffer("scale", torch.ones(16))

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](self.words(ids)))
        with torch.no_grad():
            kept = (torch.rand_like(x) > 0.1).to(x.dtype)
            self.average.mul_(0.9).add_(x.abs().mean((0, 1)), alpha=0.1)
        x = torch.view_as_complex((x * kept * self.average).unflatten(-1, (8, 2)))
        x = torch.view_as_real(x * torch.polar(torch.ones(8), torch.arange(8.0))).flatten(-2)
        x = torch.tanh(self.layers[1](x))
        self.scale = 0.9 * self.scale + 0.1 * x.detach().abs().mean((0, 1))
        with torch.autocast("cpu", enabled=False):
            x = nn.functional.dropout(x * self.scale, 0.1)
        return self.head(torch.tanh(self.layers[2](x)))


def example(script: str) -> Any:
    return __import__(script)


def language_model() -> Job:
    script = example("language_model")
    return job(partial(script.LanguageModel, layers=3, width=32), script.loss, StandardLibraryText(sequence_length=16), max_grad_norm=1.0)


def mixture_of_experts() -> Job:
    script = example("mixture_of_experts")
    return job(partial(script.MixtureModel, layers=2, width=32), script.loss, StandardLibraryText(sequence_length=16))


def image_classifier() -> Job:
    script = example("image_classifier")
    evaluated = {"eval_data": Shapes(count=11, first=4000, size=16), "eval_every": 5, "metrics": {"accuracy": script.accuracy}}
    return job(script.residual_network, script.loss, Shapes(count=64, size=16), **evaluated)


def sort_digits() -> Job:
    script = example("sort_digits")
    return job(partial(script.Sorter, width=32), script.loss, SortedDigits(count=64), max_grad_norm=1.0)


def evaluated(model: Callable[[], nn.Module]) -> Job:
    return job(model, eval_data=rows(tokens, 19, seed=8), eval_every=4, metrics={"accuracy": accuracy})


HUGGING_FACE = (
    *("gpt2", "llama", "qwen2", "qwen3", "gemma2", "gemma3", "bert", "roberta", "t5", "bart", "vit", "whisper"),
    *("mixtral", "qwen3-moe", "deepseek-v3"),
)

JOBS: dict[str, Callable[[], Job]] = {
    **{name: partial(hugging_face, name) for name in HUGGING_FACE},
    "gpt2-4": lambda: job(partial(gpt2, 4)),
    "clipped": lambda: job(
        gpt2,
        max_grad_norm=0.5,
        optimizer=partial(torch.optim.SGD, lr=0.2, momentum=0.9),
        scheduler=partial(StepLR, step_size=3, gamma=0.5),
    ),
    "counted": lambda: job(gpt2, counted_loss, max_grad_norm=1.0),
    "several": lambda: job(gpt2, several_losses, eval_data=rows(tokens, 19, seed=8)),
    "doubled": lambda: job(lambda: gpt2(4).double(), counted_loss, max_grad_norm=1.0),
    "odd": lambda: job(gpt2, counted_loss, batch_size=7),
    "padded": lambda: job(tiny("bert").model, padded_loss, rows(masked_tokens, seed=9), collate_fn=padded),
    "dropout": lambda: job(partial(gpt2, 2, 0.1), micro_batch_size=2),
    "compiled": lambda: job(partial(gpt2, 2, 0.1), micro_batch_size=2, compile={"backend": "aot_eager"}),
    "compiled-mixture": lambda: replace(mixture_of_experts(), compile={"backend": "aot_eager"}),
    "transformer": lambda: job(partial(Pairs, 0.0), word_loss),
    "transformer-dropout": lambda: job(partial(Pairs, 0.1), word_loss, micro_batch_size=2),
    "regions": lambda: job(Regions, word_loss, micro_batch_size=2),
    "repeats": lambda: job(Repeats, word_loss),
    "convolutions": lambda: job(partial(convolutions, partial(nn.GroupNorm, 2)), picture_loss, rows(pictures)),
    "batch-norm": lambda: job(
        partial(convolutions, nn.BatchNorm2d), picture_loss, rows(pictures), micro_batch_size=2, eval_data=rows(pictures, 11)
    ),
    "classifier": lambda: job(wide_classifier, picture_loss, rows(pictures)),
    "adapted": lambda: job(adapted_llama),
    "idle": lambda: job(Idle),
    "peculiar": lambda: job(Peculiar, picture_loss, rows(pictures), optimizer=partial(adam, weight_decay=0.5)),
    "evaluated": lambda: evaluated(gpt2),
    "evaluated-mixtral": lambda: evaluated(tiny("mixtral").model),
    "bf16": lambda: job(gpt2, precision="bf16"),
    "fp16": lambda: job(gpt2, precision="fp16", max_grad_norm=1.0),
    "language-model": language_model,
    "mixture-of-experts": mixture_of_experts,
    "image-classifier": image_classifier,
    "sort-digits": sort_digits,
}
