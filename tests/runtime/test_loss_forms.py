"""Losses of every form, trained in pieces as plans divide them, against plain PyTorch on the whole batch: losses and weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.data import default_collate

from atoll import Job
from atoll.errors import DividedLossError
from atoll.graph.capture import Captured, capture_program
from atoll.graph.eager import Uncaptured, capture_or_run
from atoll.runtime.executor import Accumulated, Contributed, WorkItem
from atoll.runtime.loss_weights import StepWeights

from .stage.stage_chain import Chain

BATCH, STEPS, CLASSES = 8, 3, 6
Range = tuple[int, int]


@dataclass(frozen=True)
class Division:
    """How a batch is divided: micro-batches through stages, or replicas; gradients by their share, or summed and divided (a swarm's)."""

    pieces: tuple[Range, ...]
    stages: int
    swarm: bool = False


DIVISIONS = {
    "pipeline of 2, micro-batches of 3": Division(((0, 3), (3, 6), (6, 8)), 2),
    "data 5:3": Division(((0, 5), (5, 8)), 1),
    "swarm": Division(((0, 3), (3, 6), (6, 8)), 2, swarm=True),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, values: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(values)))  # type: ignore[no-any-return]


def sample(index: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    labels = torch.randint(1, CLASSES, (5,), generator=generator)
    lengths = torch.tensor(1 + index % 3)
    labels[index % 4 :] = torch.where(torch.rand(5 - index % 4, generator=generator) < 0.4, -100, labels[index % 4 :])
    return {
        "x": torch.randn(5, 6, generator=generator),
        "labels": labels,
        "kind": torch.tensor(-100 if index % 3 == 0 else index % 2),
        "words": torch.randint(1, CLASSES, (3,), generator=generator),
        "lengths": lengths,
    }


def logits(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["x"])  # type: ignore[no-any-return]


def tokens(model: nn.Module, batch: Any, **options: Any) -> Tensor:
    return F.cross_entropy(logits(model, batch).flatten(0, 1), batch["labels"].flatten(), **options)


def ctc(model: nn.Module, batch: Any, reduction: str) -> Tensor:
    log_probs = logits(model, batch).log_softmax(-1).transpose(0, 1)
    lengths = torch.full_like(batch["lengths"], 5)
    return F.ctc_loss(log_probs, batch["words"], lengths, batch["lengths"], reduction=reduction, zero_infinity=True)


def masked_mean(model: nn.Module, batch: Any) -> Tensor:
    mask = (batch["labels"] >= 0).float()
    return (logits(model, batch).pow(2).mean(-1) * mask).sum() / mask.sum().clamp(min=1)


def binary(model: nn.Module, batch: Any) -> Tensor:
    wanted = F.one_hot(batch["labels"].clamp(min=0), CLASSES).float()
    return F.binary_cross_entropy_with_logits(logits(model, batch), wanted, pos_weight=torch.full((CLASSES,), 3.0))


def two_tasks(model: nn.Module, batch: Any) -> Tensor:
    return tokens(model, batch) + F.cross_entropy(logits(model, batch)[:, 0, :2], batch["kind"])


def everything(model: nn.Module, batch: Any) -> Tensor:
    loss = two_tasks(model, batch) + 0.3 * masked_mean(model, batch) + 0.05 * ctc(model, batch, "sum")
    loss += 0.01 * F.mse_loss(logits(model, batch), batch["x"])
    return loss


def root(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(logits(model, batch), batch["x"]).sqrt()


PLAIN: dict[str, Callable[[nn.Module, Any], Tensor]] = {
    "ignore_index": tokens,
    "class weights": lambda model, batch: tokens(model, batch, weight=torch.arange(1.0, CLASSES + 1)),
    "label smoothing": lambda model, batch: tokens(model, batch, label_smoothing=0.1),
    "summed": lambda model, batch: tokens(model, batch, reduction="sum"),
    "masked mean": masked_mean,
    "pos_weight": binary,
    "ctc": lambda model, batch: ctc(model, batch, "mean"),
    "summed ctc": lambda model, batch: ctc(model, batch, "sum"),
    "two tasks": two_tasks,
    "everything": everything,
    "refused: a root": root,
}


def job_of(model: Callable[[], nn.Module], loss: Callable[[nn.Module, Any], Tensor], data: Any) -> Job:
    return Job(
        model=model,
        loss=loss,
        data=data,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9),
        batch_size=BATCH,
        steps=STEPS,
    )


def whole_batch(job: Job) -> tuple[list[float], dict[str, Tensor]]:
    """Plain PyTorch."""
    model = job.build_model()
    optimizer = job.build_optimizer(model.parameters())
    losses = []
    for step in range(STEPS):
        loss: Any = job.loss(model, job.samples.batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def in_pieces(job: Job, captured: Captured, division: Division) -> tuple[list[float], dict[str, Tensor]]:
    """The captured program as a plan divides it, by the executor that every mode has."""
    layers = len(captured.graph.layers)
    cut = next(i + 1 for i, layer in enumerate(captured.graph.layers[: layers - 1]) if layer.cut and 2 * (i + 1) >= layers - 1)
    known: dict[str, nn.Parameter] = {}
    sink = Contributed(BATCH, lambda: list(known.values())) if division.swarm else Accumulated(BATCH)
    chain = Chain(captured, job.build_model(), [0, cut, layers] if division.stages == 2 else [0, layers], gradients=sink)
    known |= chain.parameters
    optimizer = job.build_optimizer(known.values())
    weights = StepWeights(chain.sizes, division.pieces, lambda step, start, stop: job.samples.batch(step, start, stop))
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        found = [_piece(chain, job, step, number, piece, weights) for number, piece in enumerate(division.pieces)]
        total, weight = (sum(one[place] for one in found) for place in (0, 1))
        divisor = weight if division.swarm or chain.executor.deferred else 1.0
        for place, parameter in enumerate(known.values()):
            sums = [stage[place] for _, _, gradients in found for stage in gradients.values() if stage and stage[place] is not None]
            parameter.grad = torch.stack(sums).sum(0) if sums else parameter.grad  # type: ignore[arg-type]
            if parameter.grad is not None:
                parameter.grad /= divisor
        optimizer.step()
        losses.append(total / divisor)
    return losses, {name: value.detach() for name, value in known.items()}


def _piece(chain: Chain, job: Job, step: int, number: int, piece: Range, weights: StepWeights) -> tuple[float, float, Any]:
    samples = piece[1] - piece[0]
    chain.forward(number, job.samples.batch(step, *piece), samples, weights.of(step))
    loss = chain.executor.loss(WorkItem(len(chain.programs) - 1, 1, number, number, samples))
    return float(loss.total), float(loss.weight), chain.backward(number, samples)


def check_equal(job: Job, divisions: Sequence[Division] = tuple(DIVISIONS.values())) -> None:
    captured = capture_program(job, divided=True, check=True)
    losses, weights = whole_batch(job)
    for division in divisions:
        found, trained = in_pieces(job, captured, division)
        torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(trained, {name: weights[name] for name in trained}, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", PLAIN)
def test_pieces_train_as_the_whole_batch_does_or_the_job_is_refused(name: str) -> None:
    job = job_of(Model, PLAIN[name], [sample(index) for index in range(BATCH * STEPS)])
    if name.startswith("refused"):
        with pytest.raises(DividedLossError, match=r"test_loss_forms\.py:\d+"):
            capture_program(job, divided=True, check=True)
    else:
        check_equal(job)


def masks_at_random(samples: list[Any]) -> Any:
    batch = default_collate(samples)
    hidden = torch.rand(batch["labels"].shape) < 0.5
    return batch | {"x": batch["x"].masked_fill(hidden[..., None], 0.0), "labels": batch["labels"].masked_fill(~hidden, -100)}


def test_a_collate_fn_that_draws_masks_is_told_and_pieces_train_on_what_each_was_given() -> None:
    job = replace(job_of(Model, PLAIN["ignore_index"], [sample(index) for index in range(BATCH * STEPS)]), collate_fn=masks_at_random)
    captured = capture_program(job, divided=True, check=True)
    assert any("`collate_fn` draws random numbers" in note for note in captured.notes)
    for division in DIVISIONS.values():
        model = job.build_model()
        optimizer = job.build_optimizer(model.parameters())
        losses = []
        for step in range(STEPS):
            pieces: list[Any] = [job.samples.batch(step, *piece) for piece in division.pieces]
            loss: Any = job.loss(model, {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]})
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        found, trained = in_pieces(job, captured, division)
        torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(trained, {name: dict(model.named_parameters())[name].data for name in trained}, rtol=1e-5, atol=1e-5)


def test_a_loss_of_the_whole_batch_is_refused_with_masks_drawn_at_random_too() -> None:
    refused = next(name for name in PLAIN if name.startswith("refused"))
    job = replace(job_of(Model, PLAIN[refused], [sample(index) for index in range(BATCH * STEPS)]), collate_fn=masks_at_random)
    with pytest.raises(DividedLossError, match=r"is not that of its pieces"):
        capture_program(job, divided=True, check=True)


def test_data_that_draw_from_a_generator_of_their_own_are_named() -> None:
    own = torch.Generator().manual_seed(0)

    def collate(samples: list[Any]) -> Any:
        batch = default_collate(samples)
        return batch | {"x": batch["x"] + torch.randn(batch["x"].shape, generator=own)}

    job = replace(job_of(Model, PLAIN["ignore_index"], [sample(index) for index in range(BATCH * STEPS)]), collate_fn=collate)
    with pytest.raises(DividedLossError, match="another batch when they are loaded again"):
        capture_program(job, divided=True, check=True)


@pytest.mark.parametrize("name", ["ignore_index", "two tasks", "summed"])
def test_one_process_adds_up_its_micro_batches_and_its_evaluation(name: str) -> None:
    job = job_of(Model, PLAIN[name], [sample(index) for index in range(BATCH * STEPS)])
    losses, weights = whole_batch(job)
    kept = [sample(index) for index in range(100, 120)]
    metrics = {"masked": masked_mean, "largest": lambda model, batch: logits(model, batch).max()}
    result = replace(job, micro_batch_size=3, eval_data=kept, metrics=metrics).run(progress=False)
    torch.testing.assert_close(list(result.losses), losses, rtol=1e-5, atol=1e-5)
    assert result.model is not None
    torch.testing.assert_close(dict(result.model.named_parameters()), weights, rtol=1e-5, atol=1e-5)
    (evaluated,) = result.evaluations
    with torch.no_grad():
        whole = default_collate(kept)
        expected = float(PLAIN[name](result.model, whole)) * (BATCH / len(kept) if name == "summed" else 1.0)
        assert evaluated.loss == pytest.approx(expected, rel=1e-5)
        assert evaluated.metrics["masked"] == pytest.approx(float(masked_mean(result.model, whole)), rel=1e-5)
    assert [note for note in evaluated.notes if "'largest'" in note and "(total, weight)" in note]


def test_a_loss_that_is_no_mean_is_refused_in_one_process_too() -> None:
    job = job_of(Model, root, [sample(index) for index in range(BATCH)])
    with pytest.raises(DividedLossError, match="without micro_batch_size"):
        replace(job, micro_batch_size=3).run(progress=False)


def test_padding_that_counts_is_found_in_the_first_batch() -> None:
    """The first four samples are of one length; a later one is longer, and the whole batch is padded to it."""

    def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {"x": nn.utils.rnn.pad_sequence([sample["x"] for sample in samples], batch_first=True)}

    data = [{"x": torch.randn(9 if index == 6 else 5, 6, generator=torch.Generator().manual_seed(index))} for index in range(40)]
    job = replace(job_of(Model, lambda model, batch: model(batch["x"]).pow(2).mean(), data), collate_fn=padded)
    first = [job.samples.index(position) for position in range(BATCH)]
    data[first[6]], data[6] = data[6], data[first[6]]
    with pytest.raises(DividedLossError, match="pad to one length"):
        capture_program(job, divided=True, check=True)


def test_what_cannot_be_read_is_not_believed_because_nothing_was_ignored() -> None:
    def odd(model: nn.Module, batch: Any) -> Tensor:
        counts = (batch["words"] != -100).float()
        return (logits(model, batch)[:, :3, 0].pow(2) * counts).sum() / counts.sum().pow(1.0)

    job = job_of(Model, odd, [sample(index) for index in range(BATCH)])
    with pytest.raises(DividedLossError, match=r"`div`|`pow`"):
        capture_program(job, divided=True, check=True)


SMALL = {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=24, n_embd=16, n_layer=2, n_head=2, n_positions=8, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    config.attn_pdrop = 0
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(**SMALL, max_position_embeddings=8, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    return transformers.BertForPreTraining(config)


def t5() -> nn.Module:
    config = transformers.T5Config(vocab_size=24, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, dropout_rate=0)
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config)


def wav2vec2(reduction: str) -> nn.Module:
    off = ("attention_dropout", "hidden_dropout", "feat_proj_dropout", "final_dropout", "activation_dropout", "layerdrop", "mask_time_prob")
    sizes = {"conv_dim": (8, 8), "conv_kernel": (4, 4), "conv_stride": (4, 4), "num_conv_pos_embeddings": 4}
    groups = {"num_conv_pos_embedding_groups": 2, "ctc_loss_reduction": reduction, "ctc_zero_infinity": True}
    config = transformers.Wav2Vec2Config(**SMALL, **sizes, **groups, **dict.fromkeys(off, 0.0))  # type: ignore[arg-type]
    return transformers.Wav2Vec2ForCTC(config)


def mixtral(router: bool) -> nn.Module:
    config = transformers.MixtralConfig(
        **SMALL, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, output_router_logits=router, router_aux_loss_coef=0.1
    )
    return transformers.MixtralForCausalLM(config)


def words(index: int, length: int = 8) -> dict[str, Tensor]:
    ids = torch.randint(3, 24, (length,), generator=torch.Generator().manual_seed(index))
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(length) < index % 5, -100)}


def pair(index: int) -> dict[str, Tensor]:
    return words(index) | {"next_sentence_label": torch.tensor(-100 if index % 3 == 0 else index % 2)}


def speech(index: int) -> dict[str, Tensor]:
    labels = words(index, 4)["input_ids"].masked_fill(torch.arange(4) > index % 3, -100)
    return {"input_values": torch.randn(160, generator=torch.Generator().manual_seed(index)), "labels": labels}


HUGGING_FACE: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Tensor]]]] = {
    "GPT-2": (gpt2, words),
    "BERT for pre-training": (bert, pair),
    "T5": (t5, words),
    "wav2vec2, CTC summed": (lambda: wav2vec2("sum"), speech),
    "wav2vec2, CTC mean": (lambda: wav2vec2("mean"), speech),
    "Mixtral": (lambda: mixtral(False), words),
    "refused: Mixtral with its auxiliary loss": (lambda: mixtral(True), words),
}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face_models_train_in_pieces_by_their_own_loss(name: str) -> None:
    model, make = HUGGING_FACE[name]
    job = job_of(model, lambda model, batch: model(**batch).loss, [make(index) for index in range(BATCH * STEPS)])
    if name.startswith("refused"):
        with pytest.raises(DividedLossError, match=r"balances experts .* router_aux_loss_coef=0"):
            capture_program(job, divided=True, check=True)
    else:
        check_equal(job)


class Gated(Model):
    """A gate that begins at zero lets the batch's mean in."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(CLASSES))

    def forward(self, values: Tensor) -> Tensor:
        found = super().forward(values)
        return found + self.gate * found.mean(0)


class Counting(Model):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, values: Tensor) -> Tensor:
        self.seen += values.shape[0]
        return super().forward(values)


def by_samples(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(logits(model, batch), batch["x"], reduction="none").mean((1, 2))


def confident(model: nn.Module, batch: Any) -> Tensor:
    found = logits(model, batch)
    return found[found.detach().abs().amax(-1) < 1.5].pow(2).mean()


def selected(model: nn.Module, batch: Any) -> Tensor:
    return logits(model, batch)[batch["mask"].bool()].pow(2).mean()


LATER: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Any], Tensor]]] = {
    "a mask of numbers that is whole in the first batch": (Model, selected),
    "samples that are of one length in the first batch": (Model, lambda model, batch: model(batch["long"]).pow(2).mean(2).mean(1).mean()),
    "a gate that is closed in the first step": (Gated, lambda model, batch: F.mse_loss(logits(model, batch), batch["x"])),
    "weights that are equal in the first batch": (
        Model,
        lambda model, batch: torch.dot(batch["weight"], by_samples(model, batch)) / batch["weight"].sum(),
    ),
    "numbers whose mean is taken off": (
        Model,
        lambda model, batch: (by_samples(model, batch) * (2 + batch["weight"] - batch["weight"].mean())).mean(),
    ),
    "a threshold that everything passes": (Model, confident),
    "a count of samples that the first pieces do not have": (Model, lambda model, batch: by_samples(model, batch).topk(4).values.mean()),
    "a count that every piece changes": (Counting, lambda model, batch: logits(model, batch).pow(2).sum() / model.seen),
}


@pytest.mark.parametrize("name", LATER)
def test_what_the_first_batch_does_not_show_is_found(name: str) -> None:
    def collated(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        long = nn.utils.rnn.pad_sequence([one.pop("long") for one in map(dict, samples)], batch_first=True)
        return default_collate([{k: v for k, v in one.items() if k != "long"} for one in samples]) | {"long": long}  # type: ignore[no-any-return]

    data = [
        {
            "x": sample(index)["x"],
            "mask": (torch.arange(5) < (5 if index < BATCH else 1 + index % 4)).float(),
            "weight": torch.tensor(0.5 if index < BATCH else 0.1 * (index % 7)),
            "long": torch.ones(3 if index < BATCH else 3 + index % 3, 6),
        }
        for index in range(2 * BATCH)
    ]
    model, loss = LATER[name]
    job = replace(job_of(model, loss, data), collate_fn=collated, sampler=lambda epoch: range(2 * BATCH))
    with pytest.raises(DividedLossError, match="not that of its pieces"):
        capture_or_run(job, check=True, most_bytes=2.0**33)


def test_a_model_that_changes_its_batch_in_place_is_compared_with_the_batch_as_it_was() -> None:
    def halved(model: nn.Module, batch: Any) -> Tensor:
        batch["x"].mul_(0.5)
        return logits(model, batch).pow(2).mean()

    check_equal(job_of(Model, halved, [sample(index) for index in range(BATCH * STEPS)]))


@pytest.mark.parametrize("least", ["clamp", "epsilon"])
def test_a_batch_in_which_nothing_counts_is_a_loss_of_zero_where_the_user_wrote_so(least: str) -> None:
    def masked(model: nn.Module, batch: Any) -> Tensor:
        count = (batch["words"][:, 0] == 0).sum()
        kept = logits(model, batch)[:, 0].pow(2).mean(-1) * (batch["words"][:, 0] == 0)
        return kept.sum() / (count.clamp(min=1) if least == "clamp" else count + 1e-8)

    data = [sample(index) | {"words": torch.full((3,), int(index // BATCH == 1 or index % 3 == 1))} for index in range(BATCH * STEPS)]
    job = replace(job_of(Model, masked, data), sampler=lambda epoch: range(BATCH * STEPS))
    assert whole_batch(job)[0][1] == 0.0
    check_equal(job)


def test_a_number_of_samples_that_is_a_constant_of_the_program_is_the_only_one_it_runs_on() -> None:
    job = job_of(Model, lambda model, batch: logits(model, batch).pow(2).sum() / len(batch["x"]), [sample(index) for index in range(BATCH)])
    captured = capture_program(job, divided=True, check=True)
    assert captured.graph.fixed_samples == captured.samples


def test_a_gradient_in_the_loss_is_trained_in_micro_batches() -> None:
    def penalty(model: nn.Module, batch: Any) -> Tensor:
        values = batch["x"].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(values).sum(), values, create_graph=True)
        return slope.flatten(1).norm(dim=1).sub(1).square().mean()

    job = job_of(Model, penalty, [sample(index) for index in range(BATCH * STEPS)])
    result = replace(job, micro_batch_size=3).run(progress=False)
    torch.testing.assert_close(list(result.losses), whole_batch(job)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("where", ["parameter", "module", "activation", "graph"])
def test_hooks_on_gradients_are_not_lost(where: str) -> None:
    def hooked() -> nn.Module:
        model = Model()
        if where == "parameter":
            model.first.weight.register_hook(lambda gradient: gradient * 3)  # type: ignore[no-untyped-call]
        elif where == "module":
            model.last.register_full_backward_hook(lambda module, inside, outside: (inside[0] * 3,))
        else:
            model.last.register_forward_hook(in_the_forward)
        return model

    def in_the_forward(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if where == "activation" and output.requires_grad:
            output.register_hook(lambda gradient: gradient * 3)  # type: ignore[no-untyped-call]
        if where == "graph" and output.grad_fn is not None:
            output.grad_fn.register_prehook(lambda gradients: tuple(3 * gradient for gradient in gradients))  # type: ignore[misc]

    found = capture_or_run(job_of(hooked, tokens, [sample(index) for index in range(BATCH)]), check=True, most_bytes=2.0**33)
    assert isinstance(found, Uncaptured)
    assert "hook on its gradient" in found.reason or "hooks on gradients are no part of" in found.reason


def test_a_module_that_a_forward_builds_around_its_parameters_asks_for_no_hook() -> None:
    """Registering a parameter has PyTorch look at its `grad_fn`, as in BigBird's attention for short texts."""

    class Builds(Model):
        def forward(self, values: Tensor) -> Tensor:
            built = nn.Linear(1, 1)
            built.weight, built.bias = self.last.weight, self.last.bias
            return super().forward(values) + 0.0 * built.weight.sum()

    found = capture_or_run(job_of(Builds, tokens, [sample(index) for index in range(BATCH)]), check=True, most_bytes=2.0**33)
    assert not isinstance(found, Uncaptured), found.reason
