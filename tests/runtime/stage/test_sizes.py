"""Sizes: shapes of what crosses a cut follow from the batch, and a batch that does not fit is refused with words."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.errors import JobError
from atoll.graph.capture import Captured, capture_program
from atoll.runtime.stage.program import cut_stage
from atoll.runtime.stage.sizes import Sizes

from .stage_chain import Chain, job_of


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(3))
        self.head = nn.Linear(8, 20)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def guess(model: Any, batch: dict[str, Any]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["text"]["ids"]).flatten(0, 1), batch["labels"].flatten())


def batch_of(samples: int, length: int) -> dict[str, Any]:
    ids = torch.randint(0, 20, (samples, length))
    return {"text": {"ids": ids}, "labels": ids}


def fixed(samples: int) -> dict[str, Any]:
    return batch_of(samples, 5)


def growing(samples: int) -> dict[str, Any]:
    """Longer when there are more samples: capture sees that lengths vary."""
    return batch_of(samples, 4 + samples)


@pytest.fixture(scope="module")
def of_fixed_length() -> Captured:
    return capture_program(job_of(Words, guess, fixed))


@pytest.fixture(scope="module")
def of_any_length() -> Captured:
    return capture_program(job_of(Words, guess, growing))


def test_sizes_follow_from_the_number_of_samples(of_fixed_length: Captured) -> None:
    sizes = Sizes(of_fixed_length)
    assert sizes.follow_samples
    assert sizes.fixed is None
    program = cut_stage(of_fixed_length, 0, of_fixed_length.graph.cuts[1])
    (crossing,) = program.sends
    assert sizes.shape(crossing, sizes.of_samples(6)) == (6, 5, 8)
    assert sizes.sample_dim(crossing) == 0
    assert sizes.bind(sizes.leaves(batch_of(6, 5))) == sizes.of_samples(6)


@pytest.mark.parametrize(("samples", "length"), [(1, 5), (3, 9), (4, 4), (2, 12)])
def test_any_length_runs_through_every_cut(of_any_length: Captured, samples: int, length: int) -> None:
    sizes = Sizes(of_any_length)
    assert not sizes.follow_samples
    model = Words()
    chain = Chain(of_any_length, model, [0, *of_any_length.graph.cuts, len(of_any_length.graph.layers)])
    batch = batch_of(samples, length)
    assert torch.equal(chain.loss(batch), guess(model, batch).detach())
    for program in chain.programs[:-1]:
        for crossing in program.sends:
            assert sizes.sample_dim(crossing) == 0


def test_a_batch_of_another_size_is_refused(of_fixed_length: Captured) -> None:
    with pytest.raises(JobError, match=r"collate_fn: batch\['labels'\] has shape \[2, 6\].*captured with \[any, 5\].*pad or cut"):
        Sizes(of_fixed_length).leaves({"text": {"ids": torch.zeros(2, 5, dtype=torch.long)}, "labels": torch.zeros(2, 6, dtype=torch.long)})


def test_a_batch_of_another_structure_is_refused(of_fixed_length: Captured) -> None:
    whole = batch_of(2, 5)
    with pytest.raises(JobError, match=r"batch\['text'\]\['ids'\] is missing.*same structure"):
        Sizes(of_fixed_length).leaves({"text": {}, "labels": whole["labels"]})
    with pytest.raises(JobError, match=r"batch\['extra'\] is new"):
        Sizes(of_fixed_length).leaves(whole | {"extra": torch.zeros(2)})


def test_a_length_that_was_taken_for_the_number_of_samples_is_refused() -> None:
    sizes = Sizes(capture_program(job_of(Words, guess, lambda samples: batch_of(samples, samples))))
    leaves = sizes.leaves(batch_of(2, 6))
    with pytest.raises(JobError, match=r"count 2 and 6 along dimensions that both were the number of samples when the job was captured"):
        sizes.bind(leaves)
