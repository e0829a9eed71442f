"""SpecAugment, which Hugging Face draws with NumPy: the captured program masks as the model's own code does, and anew every time."""

import random

import numpy
import pytest
import torch
from torch import Tensor, nn

import atoll
from atoll.graph.capture import capture_program
from atoll.graph.eager import _check_answers
from atoll.graph.spec_augment import draw_mask
from atoll.runtime.stage.rng import DrawKey, EagerDraws

from .stage_chain import Chain, job_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def build() -> nn.Module:
    import transformers

    config = transformers.Wav2Vec2Config(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        conv_dim=(8, 8),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        mask_feature_prob=0.2,
        mask_feature_length=2,
        mask_time_prob=0.3,
        mask_time_length=4,
        layerdrop=0.0,
    )
    torch.manual_seed(0)
    model: nn.Module = transformers.Wav2Vec2ForCTC(config)
    return model


def speech(samples: int) -> dict[str, Tensor]:
    mask = torch.arange(400)[None] < torch.randint(300, 401, (samples,))[:, None]
    return {"input_values": torch.randn(samples, 400) * mask, "attention_mask": mask.long(), "labels": torch.randint(1, 20, (samples, 5))}


def test_spec_augment_draws_in_stages_what_it_draws_in_one_process() -> None:
    job = job_of(build, lambda model, batch: model(**batch).loss, speech)
    captured = capture_program(job)
    model, key = build().train(), DrawKey(4)
    chain = Chain(captured, model, [0, captured.graph.cuts[len(captured.graph.cuts) // 2], len(captured.graph.layers)], key=key)
    losses = []
    for step, samples in ((1, 3), (2, 3), (2, 5)):  # a number of samples that was not captured
        batch = job.example_batch(samples)
        key.step, key.first_sample = 1, step
        random.seed(step)
        numpy.random.seed(step)  # of no consequence
        before = numpy.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
        model.zero_grad()
        with EagerDraws(key, model):
            expected = job.loss(model, batch)
        expected.backward()
        assert numpy.random.get_state()[1].tolist() == before  # type: ignore[index, union-attr]
        for parameter in chain.parameters.values():
            parameter.grad = None
        found = chain.forward(step, batch)
        chain.backward(step)
        torch.testing.assert_close(found, expected.detach())
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(chain.parameters[name].grad, parameter.grad)
        losses.append(float(found))
    assert len(set(losses)) == 3


def test_the_lengths_that_spec_augment_asks_for_may_differ_between_batches() -> None:
    """They are a question of the operator, not of the model's code."""
    rows = speech(24)
    data = [{name: values[index] for name, values in rows.items()} for index in range(24)]
    job = atoll.Job(model=build, loss=lambda model, batch: model(**batch).loss, data=data, batch_size=4, steps=2, optimizer=torch.optim.SGD)
    _check_answers(job)


def test_a_mask_is_what_hugging_face_draws_from_the_seed() -> None:
    from transformers.models.hubert import modeling_hubert

    torch.manual_seed(2**40 + 5)
    found = draw_mask(modeling_hubert.__name__, (3, 30), 0.4, 3)
    numpy.random.seed((2**40 + 5) & 0xFFFFFFFF)
    assert (found == modeling_hubert._compute_mask_indices((3, 30), 0.4, 3)).all()
    assert found.any()
