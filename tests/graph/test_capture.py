"""Capture of small models made for one question each."""

import itertools
import logging
from typing import Any

import msgspec
import pytest
import torch
from captured_models import TinyJob, run_in_two_stages
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import atoll
from atoll.errors import CaptureError, JobError
from atoll.graph.capture import Captured, capture, capture_program

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
WIDTH = 8


def to_zero(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def vectors(samples: int) -> Tensor:
    return torch.randn(samples, WIDTH)


def job_of(model: Any, *, loss: Any = to_zero, batch: Any = vectors, precision: Any = "fp32") -> TinyJob:
    return TinyJob("tiny", model, loss, batch, precision)


def check_all_cuts(job: TinyJob, captured: Captured, model: nn.Module) -> None:
    """Every legal cut gives eager's loss and gradients."""
    model.train()
    batch = job.example_batch(3)
    model.zero_grad()
    torch.manual_seed(7)
    expected = job.loss(model, batch)
    expected = expected if isinstance(expected, Tensor) else expected[0] / expected[1]
    expected.backward()
    wanted = {id(p): p.grad.clone() for p in model.parameters() if p.grad is not None}
    assert captured.graph.cuts
    for cut in captured.graph.cuts:
        torch.manual_seed(7)
        loss, gradients = run_in_two_stages(captured, model, batch, cut)
        torch.testing.assert_close(loss, expected.detach())
        assert gradients.keys() == wanted.keys()
        for key, gradient in gradients.items():
            torch.testing.assert_close(gradient, wanted[key])


class Residual(nn.Module):
    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self, blocks: list[nn.Module], head: nn.Module):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(blocks), head

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def residual_model(blocks: int = 3) -> nn.Module:
    return Blocks([Residual() for _ in range(blocks)], nn.Linear(WIDTH, 2))


def test_sequential_is_divided_by_its_children() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    captured = capture_program(job_of(model))
    assert [layer.name for layer in captured.graph.layers] == ["0", "2", "4"]
    assert [layer.output_bytes for layer in captured.graph.layers] == [64.0, 64.0, 0.0]
    assert captured.graph.layers[0].work[0].backward == 1.0  # the input wants no gradient
    assert captured.varying == {"": (0,)}
    check_all_cuts(job_of(model), captured, model)


def test_blocks_have_one_signature_and_split_in_the_middle() -> None:
    graph = capture(job_of(residual_model))
    assert [layer.name for layer in graph.layers] == ["blocks.0", "blocks.1", "blocks.2", "head"]
    # the first block's input wants no gradient, so it costs less
    assert graph.layers[1].signature == graph.layers[2].signature != graph.layers[0].signature
    block = graph.layers[1]
    assert block.tensor_units == 4 * WIDTH
    assert block.tensor_reductions == 1
    assert block.tensor_bytes == block.output_bytes == WIDTH * 4
    assert block.split_parameters == 4 * WIDTH * WIDTH * 2 + 4 * WIDTH


def test_a_long_skip_crosses_every_cut_it_spans() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Residual(), Residual()])

        def forward(self, x: Tensor) -> Tensor:
            first = y = self.first(x)
            for block in self.blocks:
                y = block(y)
            return y * first

    model = Skip()
    captured = capture_program(job_of(model))
    assert [len(captured.stage(0, cut).sends) for cut in captured.graph.cuts] == [1, 2]
    check_all_cuts(job_of(model), captured, model)


def test_nothing_made_from_the_batch_alone_is_sent() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Residual(), Residual(), Residual()])

        def forward(self, x: Tensor) -> Tensor:
            mask = (x > 0).float()
            mask[:, 0] = 1.0  # in place, and still made again on each stage
            for block in self.blocks:
                x = block(x) * mask
            return x

    model = Masked()
    captured = capture_program(job_of(model))
    assert [len(captured.stage(0, cut).sends) for cut in captured.graph.cuts] == [1, 1]
    check_all_cuts(job_of(model), captured, model)


def test_a_random_mask_is_sent_and_not_drawn_again() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Residual(), Residual(), Residual()])

        def forward(self, x: Tensor) -> Tensor:
            noise = torch.rand_like(x)
            for block in self.blocks:
                x = block(x) * noise
            return x

    model = Noisy()
    captured = capture_program(job_of(model))
    assert [len(captured.stage(0, cut).sends) for cut in captured.graph.cuts] == [2, 2]
    assert [layer.output_bytes - layer.gradient_bytes for layer in captured.graph.layers[:-1]] == [WIDTH * 4.0] * 2
    check_all_cuts(job_of(model), captured, model)


def test_a_value_changed_in_place_later_cannot_be_cut_off() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Residual(), Residual(), Residual()])

        def forward(self, x: Tensor) -> Tensor:
            kept = x = self.blocks[0](x)
            x = self.blocks[1](x.clone())
            kept.mul_(2.0)
            return self.blocks[2](x) + kept

    model = InPlace()
    captured = capture_program(job_of(model))
    assert captured.graph.cuts == (2,)
    check_all_cuts(job_of(model), captured, model)


def test_tied_weights_are_counted_once_and_shared() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.blocks, self.head = (
                nn.Embedding(64, WIDTH),
                nn.ModuleList([Residual(), Residual()]),
                nn.Linear(WIDTH, 64, bias=False),
            )
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten(), reduction="sum"), batch.numel()

    model = Tied()
    job = job_of(model, loss=loss, batch=lambda n: torch.randint(0, 64, (n, 5)))
    captured = capture_program(job)
    graph = captured.graph
    (shared,) = graph.shared
    assert (shared.name, shared.parameters, shared.layers) == ("embed.weight", 64 * WIDTH, (0, 3))
    assert graph.parameters == sum(p.numel() for p in model.parameters())
    assert graph.tokens_per_sample == 5
    assert graph.layers[3].split_parameters == 0
    assert graph.layers[0].split_parameters == 64 * WIDTH
    assert any(work.split == "columns" for work in graph.layers[3].work)
    check_all_cuts(job, captured, model)


def test_a_module_called_again_and_again_is_as_many_layers() -> None:
    class Universal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Residual()

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.block(x)
            return x

    model = Universal()
    captured = capture_program(job_of(model))
    assert [layer.name for layer in captured.graph.layers] == ["block", "block@1", "block@2"]
    assert [bool(layer.parameters) for layer in captured.graph.layers] == [True, False, False]
    assert all(shared.layers == (0, 1, 2) for shared in captured.graph.shared)
    check_all_cuts(job_of(model), captured, model)


def test_parallel_heads_and_experts_are_not_layers() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, 2), nn.Tanh()) for _ in range(4)])

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.cat([head(x) for head in self.heads], dim=-1)

    graph = capture(job_of(lambda: Blocks([Heads(), Heads()], nn.Linear(WIDTH, 2))))
    assert [layer.name for layer in graph.layers] == ["blocks.0", "blocks.1", "head"]


def test_frozen_parameters_keep_no_gradient_and_nothing_for_backward() -> None:
    model = residual_model()
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    captured = capture_program(job_of(model))
    first = captured.graph.layers[0]
    assert first.parameters == 0
    assert first.frozen_parameters == sum(p.numel() for p in model.blocks[0].parameters())
    assert first.saved_bytes == first.gradient_bytes == 0
    assert all(work.backward == 0 for work in first.work)
    assert first.output_bytes == WIDTH * 4  # what a frozen part computes is sent, not computed again
    check_all_cuts(job_of(model), captured, model)


def test_unused_parameters_still_count() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = residual_model(), nn.Linear(WIDTH, 100)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model = Unused()
    assert capture(job_of(model)).parameters == sum(p.numel() for p in model.parameters())


def test_buffers_that_change_do_not_stop_cuts() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(3)])
    captured = capture_program(job_of(model))
    assert len(captured.graph.cuts) == len(captured.graph.layers) - 1
    check_all_cuts(job_of(model), captured, model)


class Doubled(torch.autograd.Function):
    """Not what autograd would make of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient * ctx.saved_tensors[0].cos()


class UsesDoubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual(), Residual()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = Doubled.apply(block(x))
        return x


def test_custom_autograd_functions_keep_their_backward() -> None:
    model = UsesDoubled()
    captured = capture_program(job_of(model))
    check_all_cuts(job_of(model), captured, model)
    assert torch.autograd.Function.__dict__["apply"].__func__.__qualname__ == "Function.apply"


class Asks(nn.Module):
    """Branches on values of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual(), Residual()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if bool((x < 1e6).all()) else x
        return x


def test_branches_on_data_are_assumed_recorded_and_checked() -> None:
    model = Asks()
    captured = capture_program(job_of(model))
    assert [assumption.value for assumption in captured.assumptions] == ["True", "True"]
    assert all(assumption.seen and assumption.where.startswith("test_capture.py:") for assumption in captured.assumptions)
    check_all_cuts(job_of(model), captured, model)
    with pytest.raises(RuntimeError, match=r"took True for granted at test_capture\.py"):
        run_in_two_stages(captured, model, torch.full((3, WIDTH), 1e9), 1)


def test_a_model_too_large_to_run_is_captured_with_the_default_answer() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10**9, WIDTH)
            self.blocks = nn.ModuleList([Residual(), Residual()])

        def forward(self, x: Tensor) -> Tensor:
            x = self.table(x)
            for block in self.blocks:
                x = x if bool(x.isinf().any()) else block(x)
            return x

    captured = capture_program(job_of(Large, batch=lambda n: torch.randint(0, 9, (n, 3))))
    assert [assumption.seen for assumption in captured.assumptions] == [False, False]
    assert any("too large to be run here" in note for note in captured.notes)
    place = captured.assumptions[0].where
    assert f"{place} asks a tensor for its value: False (2 times) is taken for granted, unseen; a run stops where that does not hold" in (
        captured.notes
    )
    assert captured.graph.parameters > 8e9


class LayerDrop(nn.Module):
    def __init__(self, probability: float) -> None:
        super().__init__()
        self.blocks, self.probability = nn.ModuleList([Residual(), Residual()]), probability

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if torch.rand([]) >= self.probability:
                x = block(x)
        return x


def test_chance_that_never_strikes_is_captured() -> None:
    assert len(capture(job_of(lambda: LayerDrop(0.0))).layers) == 2


def test_branches_on_random_numbers_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"branches on a random number.*layerdrop"):
        capture(job_of(lambda: LayerDrop(0.3)))


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).reshape(-1, 7)


def test_an_error_names_the_module() -> None:
    with pytest.raises(CaptureError, match=r"module 'blocks\.1' \(Broken\).*reshape|module 'blocks\.1' \(Broken\).*shape"):
        capture(job_of(lambda: Blocks([Residual(), Broken()], nn.Linear(7, 2))))


def test_a_local_autograd_function_is_refused_with_advice() -> None:
    class Local(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return Local.apply(model(batch)).mean()

    with pytest.raises(CaptureError, match="move it to the top of its module"):
        capture(job_of(residual_model, loss=loss))


def test_text_in_a_batch_is_named() -> None:
    def batch(samples: int) -> dict[str, Any]:
        return {"x": torch.zeros(samples, 4), "name": ["a"] * samples}

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return to_zero(model, batch["x"])

    with pytest.raises(CaptureError, match=r"batch\['name'\] holds text.*leave it out in `collate_fn`"):
        capture(job_of(nn.Linear(4, 2), loss=loss, batch=batch))


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [
        (lambda: 3, vectors, r"must be a torch\.nn\.Module"),
        (residual_model, lambda n: "text", "holds no tensor"),
        (residual_model, lambda n: torch.randn(4, WIDTH), "grows with the number of samples"),
    ],
)
def test_bad_jobs_are_explained(model: Any, batch: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(job_of(model, batch=batch))


def test_half_precision_counts_what_autocast_makes() -> None:
    """Products come out in two bytes an element; parameters stay in four."""
    full = capture(job_of(residual_model))
    half = capture(job_of(residual_model, precision="bf16"))
    assert half.precision == "bf16"
    assert half.parameters == full.parameters
    assert half.forward_flops == full.forward_flops
    for one, two in zip(full.layers, half.layers, strict=True):
        products = [(a, b) for a, b in zip(one.work, two.work, strict=False) if a.kind == b.kind == "matmul"]
        assert all(b.weight_bytes * 2 == a.weight_bytes and b.bytes * 2 == a.bytes for a, b in products)
        assert two.saved_bytes < one.saved_bytes
    assert {node.parameter_bytes for node in full.nodes} == {node.parameter_bytes for node in half.nodes}


def test_capture_allocates_no_weights_and_leaves_the_model_alone() -> None:
    model = residual_model().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    capture(job_of(model))
    assert not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(state, torch.random.get_rng_state())
    huge = capture(job_of(lambda: nn.Sequential(nn.Linear(WIDTH, 10**10), nn.Linear(10**10, 2))))
    assert huge.parameters > 1e11


def test_annotations_become_constraints() -> None:
    model = residual_model(4)
    for block in list(model.blocks)[:2]:
        atoll.split(block, 2)
    (first, second) = capture(job_of(model)).constraints
    assert {first.kind, second.kind} == {"split"}
    assert sorted(first.layers + second.layers) == [0, 1]


@settings(max_examples=12)
@given(
    widths=st.lists(st.integers(2, 9), min_size=2, max_size=5),
    skips=st.lists(st.booleans(), min_size=5, max_size=5),
    frozen=st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_any_stack_of_linears_adds_up_and_cuts_true(widths: list[int], skips: list[bool], frozen: list[bool]) -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = [WIDTH, *widths]
            self.steps = nn.ModuleList([nn.Linear(a, b) for a, b in itertools.pairwise(sizes)])
            self.shortcut = nn.Linear(WIDTH, 1)
            for step, is_frozen in zip(self.steps, frozen, strict=False):
                step.requires_grad_(not is_frozen)

        def forward(self, x: Tensor) -> Tensor:
            short = self.shortcut(x)
            for step, skip in zip(self.steps, skips, strict=False):
                x = torch.tanh(step(x))
                x = x + short if skip else x
            return x + short

    model = Stack()
    captured = capture_program(job_of(model))
    graph = captured.graph
    assert graph.parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert graph.forward_flops == sum(2 * p.numel() for p in model.parameters() if p.dim() == 2)
    assert msgspec.json.decode(msgspec.json.encode(graph), type=type(graph)) == graph
    check_all_cuts(job_of(model), captured, model)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda value: None, "it must return a tensor or"),
        (lambda value: value.mean(1), r"it returned shape \[4\]"),
        (lambda value: value.argmax(), "floating-point number, it returned torch.int64"),
        (lambda value: value.mean().detach(), "no gradient flows"),
        (lambda value: (value.sum(), value), "weight .* must be one number"),
        (lambda value: value.mean().item(), "plain number"),
    ],
)
def test_a_loss_that_cannot_be_trained_on_is_refused(returned: Any, message: str) -> None:
    with pytest.raises(JobError, match=f"Job: loss: .*{message}"):
        capture(job_of(lambda: nn.Linear(WIDTH, WIDTH), loss=lambda model, batch: returned(model(batch))))


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Linear(WIDTH, WIDTH).requires_grad_(False)])
def test_a_model_with_nothing_to_train_is_refused(model: nn.Module) -> None:
    with pytest.raises(JobError, match="no trainable parameter"):
        capture(job_of(model))


def test_what_the_users_code_raises_is_a_capture_error_with_its_cause() -> None:
    def broken(samples: int) -> Tensor:
        raise KeyError(samples)

    with pytest.raises(CaptureError, match="loading a batch failed: KeyError: 4") as raised:
        capture(job_of(nn.Linear(WIDTH, WIDTH), batch=broken))
    assert isinstance(raised.value.__cause__, KeyError)


def test_a_failing_capture_logs_nothing_and_leaves_the_loggers_as_they_were() -> None:
    seen: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = seen.append  # type: ignore[method-assign]
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.addHandler(handler)
    try:
        with pytest.raises(CaptureError):
            capture(job_of(nn.Linear(WIDTH + 1, WIDTH), loss=lambda model, batch: model(batch).mean()))
        with pytest.raises(CaptureError):
            capture(job_of(nn.Linear(WIDTH, WIDTH), loss=lambda model, batch: model(batch).reshape(7).mean()))
    finally:
        logger.removeHandler(handler)
    assert not seen
    assert logger.level == level


def test_what_cannot_be_measured_is_noted_once_with_what_was_done_instead() -> None:
    @torch.library.custom_op("atoll_test::doubled", mutates_args=())
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    doubled.register_fake(torch.empty_like)

    def backward(context: Any, gradient: Tensor) -> Tensor:
        raise RuntimeError("only on Tuesdays")

    doubled.register_autograd(backward)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return doubled(doubled(self.layer(x)))

    notes = capture_program(job_of(Model)).notes
    assert len(notes) == 1
    assert "its backward is taken for twice its forward, because it cannot be measured: RuntimeError: only on Tuesdays" in notes[0]
    assert "atoll_test.doubled" in notes[0]


def test_a_padded_length_varies_although_the_captured_batches_happen_to_have_the_same() -> None:
    class Sentences:
        lengths = (10, 9, 10, 10, 6, 7, 10, 12)

        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.full((self.lengths[index % 8],), index % 7)

    def pad(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"tokens": nn.utils.rnn.pad_sequence(samples, batch_first=True)}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(8, 4), nn.Linear(4, 1)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.out(self.table(tokens)).mean()

    class FirstSamples:
        """As a Job, but the samples come in their own order."""

        name, model, precision = "padded", Model, "fp32"

        @staticmethod
        def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return model(batch["tokens"])

        @staticmethod
        def example_batch(samples: int) -> dict[str, torch.Tensor]:
            data = Sentences()
            return pad([data[i] for i in range(samples)])

    assert capture_program(FirstSamples()).varying == {"['tokens']": (0, 1)}


def test_what_cannot_be_measured_leaves_no_traceback_of_pytorchs(caplog: pytest.LogCaptureFixture) -> None:
    """Sizes that are only known when it runs, as some mixtures of experts have them."""

    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            large = x[:, 0] > 0
            low, high = x[large.argsort()].split(torch.stack([(~large).sum(), large.sum()]).tolist())
            found = torch.cat([self.first(low), self.second(high)])
            found[large] = self.first.bias
            return found.square().mean()

    batch = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)
    captured = capture_program(TinyJob("sorted", Sorted, lambda model, x: model(x), lambda samples: batch[:samples]))
    assert [note for note in captured.notes if "Exception" in note] == []
    assert any("how large its result is depends on the data" in note for note in captured.notes)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
