"""What a layer's work says of itself: recurrent layers are counted, operators carry their names, tensors are listed one by one."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout, scaled_dot_product_attention

from atoll.graph.capture import capture

pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes .*_flat_weights")  # export speaks of torch's own recurrent layers
WORDS, WIDTH, HIDDEN, STEPS = 50, 24, 32, 7


@dataclass
class Job:
    model: Any
    loss: Any
    name: str = "job"
    precision: Any = "fp32"

    def example_batch(self, samples):
        return torch.randint(WORDS, (samples, STEPS))


class Reader(nn.Module):
    def __init__(self, recurrent):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.recurrent = recurrent(WIDTH, HIDDEN, batch_first=True)
        self.head = nn.Linear(HIDDEN, WORDS)

    def forward(self, text):
        return self.head(self.recurrent(self.words(text))[0])


def loss(model, text):
    return cross_entropy(model(text).flatten(0, 1), text.flatten())


def work_of(graph):
    return [work for layer in graph.layers for work in layer.work]


@pytest.mark.parametrize(("recurrent", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_recurrent_layers_are_counted(recurrent, gates):
    graph = capture(Job(lambda: Reader(recurrent), loss))
    forward = 2 * STEPS * (gates * HIDDEN * (WIDTH + HIDDEN) + HIDDEN * WORDS)
    assert graph.forward_flops == pytest.approx(forward)
    assert graph.training_flops == pytest.approx(3 * forward, rel=0.1)  # the first step's state has no gradient to find


def test_an_lstm_multiplies_inputs_at_once_and_states_in_turn():
    products = [work for work in work_of(capture(Job(lambda: Reader(nn.LSTM), loss))) if work.kind == "matmul"]
    shapes = {(work.rows, work.columns, work.depth, work.count) for work in products}
    assert shapes == {(STEPS, 4 * HIDDEN, WIDTH, 1), (1, 4 * HIDDEN, HIDDEN, STEPS), (STEPS, WORDS, HIDDEN, 1)}


def test_a_gather_knows_its_table_and_layers_their_tensors():
    graph = capture(Job(lambda: Reader(nn.LSTM), loss))
    (gather,) = [work for work in work_of(graph) if work.kind == "gather"]
    assert (gather.operator, gather.rows, gather.columns, gather.depth) == ("embedding", STEPS, WIDTH, WORDS)
    assert [sum(layer.tensors) for layer in graph.layers] == [layer.parameters for layer in graph.layers]
    assert sorted(size for layer in graph.layers for size in layer.tensors) == sorted(p.numel() for p in Reader(nn.LSTM).parameters())


class Mixer(nn.Module):
    def __init__(self, **attention):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.attention = attention

    def forward(self, text):
        x = self.words(text)[:, None]
        mixed = scaled_dot_product_attention(x, x, x, **self.attention)[:, 0]
        return self.head(dropout(torch.nn.functional.gelu(mixed), 0.1))


@pytest.mark.parametrize(("attention", "variant"), [({}, ""), ({"is_causal": True}, ".causal"), ({"dropout_p": 0.1}, ".dropout")])
def test_operators_carry_their_names(attention, variant):
    names = {work.operator for work in work_of(capture(Job(lambda: Mixer(**attention), loss)))}
    assert {"gelu", "dropout", "embedding", "cross_entropy_loss", f"scaled_dot_product_attention{variant}"} <= names
