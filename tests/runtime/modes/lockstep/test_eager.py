"""What cannot be captured trains in lockstep too: two real ranks against loops written by hand."""

import dataclasses
import random
import socket
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

import atoll
from atoll.errors import DividedLossError
from atoll.events import Evaluated, StepFinished, Warned, read_events
from atoll.graph.eager import Uncaptured, capture_or_run
from atoll.plan import Plan, parse_plan
from atoll.randomness import mix
from atoll.runtime.modes.lockstep.role import Role
from atoll.runtime.modes.lockstep.worker import training_rank
from atoll.runtime.run_directory import RunDirectory, RunSettings
from atoll.runtime.training import train
from tests.process_group import fork_ranks

pytestmark = pytest.mark.timeout(600)

BATCH, STEPS, TOLERANCE = 8, 12, 1e-5
LARGE = 2.0**33


class Data:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=generator), torch.randn(3, generator=generator)


class Adaptive(nn.Module):
    """A block is repeated while some sample is large; another is for samples that are negative, of which there may be none."""

    seen: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.block, self.rare, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.never = nn.Parameter(torch.ones(3))
        self.last.bias.requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        active = x.norm(dim=1) > 2.0
        for _ in range(5):
            if not active.any():
                break
            x = torch.where(active[:, None], self.scale * torch.tanh(self.block(x)), x)
            active = active & (x.norm(dim=1) > 1.5)
        low = x.sum(dim=1) < -1.0
        if int(low.sum()) > 0:
            x = x.clone()
            x[low] = self.rare(x[low])
        if self.training:
            self.seen += 1
            self.mean = 0.5 * self.mean + 1.0  # another tensor in the buffer's place
        return self.last(x)


class Chancy(nn.Module):
    """Drops layers and adds noise by Python's and NumPy's generators, and values by PyTorch's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 3)
        self.draw: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or random.random() < 0.6:
                x = x + torch.tanh(layer(x))
        if self.training:
            x = x + float(numpy.random.normal())
            if self.draw:
                torch.manual_seed(mix(*self.draw))
            x = x if bool(x.mean() > 0) else x * 1.0  # a question whose answer is the batch's own
        return self.last(dropout(x, 0.3, self.training))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return ((model(batch[0]) - batch[1]) ** 2).mean()


def weighted(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    weights = batch[1][:, 0].abs() + 0.1
    return (weights * ((model(batch[0]) - batch[1]) ** 2).sum(dim=1)).sum(), weights.sum()


def worst(model: nn.Module, batch: Any) -> float:
    return float((model(batch[0]) - batch[1]).abs().mean())


JOB = atoll.Job(
    name="adaptive",
    model=Adaptive,
    loss=loss,
    data=Data(),
    optimizer=partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1, eps=1e-3),
    scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=4, gamma=0.5),
    max_grad_norm=1.0,
    batch_size=BATCH,
    steps=STEPS,
    eval_data=[Data()[i] for i in range(11)],
    metrics={"worst": worst},
)
UNEQUAL = "stage 0: layers 0-0: a=3 b=5"
SHARDED = "stage 0: layers 0-0 sharded: (a b)=3,5"


def plan_of(job: atoll.Job, text: str, micro_batch: int = BATCH) -> Plan:
    return parse_plan(f"plan v1 graph={job.name} cluster=c batch={BATCH} micro_batch={micro_batch}\n{text}\n")


def plain(job: atoll.Job, pieces: tuple[tuple[int, int], ...] = ((0, BATCH),)) -> tuple[list[float], nn.Module]:
    """The loop as one would write it; with several pieces, seeded for each."""
    model, losses = job.build_model("cpu"), []
    optimizer = job.optimizer([p for p in model.parameters() if p.requires_grad])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    for step in range(job.total_steps):
        optimizer.zero_grad()
        values = []
        for number, (start, stop) in enumerate(pieces):
            batch = job.samples.batch(step, start, stop)
            if isinstance(model, Chancy):
                key = mix(job.seed, 5, step + 1, number)
                random.seed(key)
                numpy.random.seed(key & 0xFFFFFFFF)
                model.draw = (job.seed, 5, step + 1, start, 0)
            value: Any = job.loss(model, batch)
            value = value[0] / value[1] if isinstance(value, tuple) else value * (stop - start) / BATCH
            value.backward()
            values.append(float(value.detach()))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(sum(values))
    return losses, model


def run_rank(rank: int, jobs: dict[str, tuple[atoll.Job, Plan | None]], ports: dict[str, int], folder: Path) -> None:
    torch.set_num_threads(1)
    for name, (job, plan) in jobs.items():
        role = Role(  # as torchrun would say
            rank=rank,
            world_size=2,
            local_rank=rank,
            local_world_size=2,
            master_addr="127.0.0.1",
            master_port=ports[name],
            source="torchrun",
        )
        directory = RunDirectory(folder / name)
        settings = RunSettings(script=__file__, arguments=())
        if rank == 0 and not directory.path.exists():
            directory.create(settings)
        assert plan is not None
        with training_rank(job, plan, role, directory=directory, settings=settings, observers=[]) as training:
            train(training)


def in_two_processes(folder: Path, jobs: dict[str, tuple[atoll.Job, Plan]]) -> None:
    ports = {}
    for name in jobs:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports[name] = probe.getsockname()[1]
    assert fork_ranks(2, run_rank, jobs, ports, folder) == 0


def losses_of(run: Path) -> list[float]:
    return [event.loss for event in read_events(run / "events.jsonl") if isinstance(event, StepFinished)]


def test_a_run_goes_from_one_process_to_unequal_shares_to_shards_and_back(tmp_path: Path) -> None:
    job, run = JOB, tmp_path / "run"
    dataclasses.replace(job, steps=3).run(out=run, progress=False)
    in_two_processes(tmp_path, {"run": (dataclasses.replace(job, steps=6), plan_of(job, UNEQUAL))})
    in_two_processes(tmp_path, {"run": (dataclasses.replace(job, steps=9, capture=False), plan_of(job, SHARDED))})
    result = job.run(resume=run, progress=False)
    losses, model = plain(job)
    assert losses_of(run) == pytest.approx(losses, rel=TOLERANCE)
    assert result.model is not None
    for name, value in model.named_parameters():
        assert torch.allclose(result.model.get_parameter(name), value, rtol=TOLERANCE, atol=TOLERANCE), name
    assert torch.equal(result.model.get_parameter("never"), torch.ones(3)), "no gradient, no weight decay"
    evaluations = {event.step: event for event in read_events(run / "events.jsonl") if isinstance(event, Evaluated)}
    for steps in (6, 9):
        assert evaluations[steps].samples == 11
    assert evaluations[STEPS].metrics["worst"] is not None
    warned = [event.message for event in read_events(run / "events.jsonl") if isinstance(event, Warned)]
    assert len(warned) == 2
    assert "no pipeline and no tensor parallelism" in warned[0]
    assert "test_eager.py" in warned[0]
    assert "asks a tensor for its value, which differs between batches: `if " in warned[0]
    assert "it says capture=False" in warned[1]


def test_random_numbers_and_totals_are_those_of_one_process(tmp_path: Path) -> None:
    job = dataclasses.replace(JOB, name="chancy", model=Chancy, steps=6, eval_data=None, metrics={}, capture=False)
    halves = plan_of(job, "stage 0: layers 0-0: a=4 b=4", 4)
    totals = dataclasses.replace(JOB, loss=weighted, capture=False, steps=6)
    in_two_processes(tmp_path, {"run": (job, halves), "totals": (totals, plan_of(totals, UNEQUAL, 2))})
    assert losses_of(tmp_path / "totals") == pytest.approx(plain(totals)[0], rel=TOLERANCE)
    (evaluated,) = [event for event in read_events(tmp_path / "totals" / "events.jsonl") if isinstance(event, Evaluated)]
    assert [note.partition(" is averaged")[0] for note in evaluated.notes] == ["metrics['worst']"], "the loss returns its weight"
    losses, _ = plain(job, ((0, 4), (4, 8)))
    assert losses_of(tmp_path / "run") == pytest.approx(losses, rel=TOLERANCE)
    alone = dataclasses.replace(job, micro_batch_size=4).run(progress=False)
    assert alone.losses == pytest.approx(losses, rel=TOLERANCE)


class Tokens:
    """Labels of which another number is ignored in each sample; in some, all but the first, which is not predicted."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, 9, (7,), generator=generator)
        counted = 1 if index % 3 == 0 else 2 + index % 6
        return {"ids": ids, "labels": ids.where(torch.arange(7) < counted, -100)}


class Dropping(nn.Module):
    """Asks for a random number in evaluations too, where it decides nothing: so do Hugging Face's speech models."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer, self.last = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 9)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        skipped = bool(torch.rand([]) < 0.3) and self.training
        return self.last(x if skipped else x + torch.tanh(self.layer(x)))


def next_token(model: nn.Module, batch: dict[str, Tensor], reduction: str = "mean") -> Tensor:
    logits = model(batch["ids"])[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction=reduction)


def by_hand(job: atoll.Job, pieces: list[tuple[int, int]]) -> list[float]:
    """Totals of pieces, divided by what counts in the batch; layers are dropped piece by piece."""
    model, losses = job.build_model("cpu"), []
    optimizer = job.optimizer(list(model.parameters()))
    summed = job.loss.keywords["reduction"] == "sum"  # type: ignore[union-attr]
    for step in range(job.total_steps):
        optimizer.zero_grad()
        total = torch.zeros(())
        for start, stop in pieces:
            torch.manual_seed(mix(job.seed, 5, step + 1, start, 0))
            total = total + next_token(model, job.samples.batch(step, start, stop), "sum")
        value = total if summed else total / int((job.samples.batch(step)["labels"][:, 1:] != -100).sum())
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses


def test_sums_and_means_over_labels_are_exact_though_nothing_is_captured(tmp_path: Path) -> None:
    job = atoll.Job(
        model=Dropping,
        loss=next_token,
        data=Tokens(),
        batch_size=BATCH,
        steps=6,
        optimizer=partial(torch.optim.SGD, lr=0.05),
        capture=False,
    )
    jobs = {name: dataclasses.replace(job, name=name, loss=partial(next_token, reduction=name)) for name in ("mean", "sum")}
    plans = {name: (job, plan_of(job, "stage 0: layers 0-0: a=2 b=6", 2)) for name, job in jobs.items()}
    in_two_processes(tmp_path, plans)
    pieces = [(start, start + 2) for start in range(0, BATCH, 2)]
    for name, job in jobs.items():
        losses = by_hand(job, pieces)
        assert losses_of(tmp_path / name) == pytest.approx(losses, rel=TOLERANCE)
        assert dataclasses.replace(job, micro_batch_size=2).run(progress=False).losses == pytest.approx(losses, rel=TOLERANCE)
    counted = [(jobs["mean"].samples.batch(step, *piece)["labels"][:, 1:] != -100).sum() for step in range(6) for piece in pieces]
    assert min(counted) == 0, "some piece has nothing that counts"


def contrastive(model: nn.Module, batch: Any) -> Tensor:
    found = model(batch[0])
    return torch.logsumexp(found @ found.T, dim=1).mean()


def test_a_loss_that_compares_samples_is_refused() -> None:
    with pytest.raises(DividedLossError, match="the loss of a batch is not that of its pieces"):
        capture_or_run(dataclasses.replace(JOB, loss=contrastive, capture=False), most_bytes=LARGE)


def speech() -> nn.Module:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 9}
    ears = {"conv_dim": (16,), "conv_stride": (5,), "conv_kernel": (10,), "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    return Wav2Vec2ForCTC(Wav2Vec2Config(**sizes, **ears, feat_extract_norm="layer", num_feat_extract_layers=1, layerdrop=0.5))


def translation() -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    sides = {f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in (("layers", 3), ("ffn_dim", 16))}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5}
    return BartForConditionalGeneration(BartConfig(vocab_size=9, d_model=16, max_position_embeddings=16, **sides, **heads))


def transcription() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sides = {f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in (("layers", 3), ("ffn_dim", 16))}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5}
    sound = {"num_mel_bins": 4, "max_source_positions": 10, "max_target_positions": 16, "mask_time_prob": 0.2, "mask_time_length": 2}
    tokens = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2, "decoder_start_token_id": 2}
    return WhisperForConditionalGeneration(
        WhisperConfig(vocab_size=9, d_model=16, apply_spec_augment=True, **sides, **heads, **sound, **tokens)
    )


class Labelled:
    """Samples of a model of these inputs, with labels of which some are ignored."""

    def __init__(self, **inputs: tuple[int, ...]) -> None:
        self.inputs = inputs

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        labels = torch.randint(3, 9, (6,), generator=generator).where(torch.arange(6) < 2 + index % 5, -100)
        numbers = {name: torch.randn(shape, generator=generator) for name, shape in self.inputs.items()}
        return {name: (10 * value.abs()).long() % 9 if name == "input_ids" else value for name, value in numbers.items()} | {
            "labels": labels
        }


def models_own(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss  # type: ignore[no-any-return]


LAYER_DROP = {
    "speech": (speech, Labelled(input_values=(400,)), UNEQUAL, "modeling_wav2vec2.py"),
    "translation": (translation, Labelled(input_ids=(7,)), SHARDED, "modeling_bart.py"),
    "transcription": (transcription, Labelled(input_features=(4, 20)), UNEQUAL, "modeling_whisper.py"),
}


def test_models_that_drop_layers_train_as_they_are_written_and_as_one_process(tmp_path: Path) -> None:
    jobs, plans = {}, {}
    for name, (model, data, plan, file) in LAYER_DROP.items():
        given = {"batch_size": BATCH, "steps": 3, "micro_batch_size": 4, "optimizer": partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)}
        jobs[name] = atoll.Job(name=name, model=model, loss=models_own, data=data, **given)
        found = capture_or_run(jobs[name], check=True, most_bytes=LARGE)
        assert isinstance(found, Uncaptured)
        assert file in found.notes[0], "the line is told"
        jobs[name] = dataclasses.replace(jobs[name], capture=False)  # nobody has to find it out again
        pieces = plan.replace("3", "4").replace("5", "4")  # those of one process: four samples each
        plans[name] = jobs[name], plan_of(jobs[name], pieces, 8 if "sharded" in plan else 4)
    in_two_processes(tmp_path, plans)
    for name, job in jobs.items():
        expected = job.run(progress=False).losses
        assert losses_of(tmp_path / name) == pytest.approx(expected, rel=TOLERANCE), name
