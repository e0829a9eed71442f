"""The graph of a recurrent translator (GNMT) from its published shape. A sample is one sentence pair.

An LSTM multiplies its inputs for the whole sentence at once, but its state one token after another: `sequence` small products with one row
a sample each, which is why such models use accelerators badly at small batches.
"""

from atoll.errors import JobError
from atoll.graph.graph import Graph, Layer, Precision, Work
from atoll.graph.parts import ELEMENT_BYTES, NOTHING, Part, matmul, memory
from atoll.graph.transformers import layer_of

__all__ = ["recurrent_translator"]


def _lstm(sequence: int, inputs: int, hidden: int, element: int) -> Part:
    """One direction of one layer: gates of four times the state; kept: input, gates, cell and state of every token."""
    work = (
        matmul(sequence, 4 * hidden, inputs, element),
        matmul(1.0, 4 * hidden, hidden, element, count=sequence),
        memory(11.0 * hidden * element, count=sequence, backward=1.5),  # two gate vectors in, cell in, cell and state out
    )
    return Part(work=work, parameters=4 * hidden * (inputs + hidden + 2), saved_bytes=float(sequence * (inputs + 6 * hidden) * element))


def _residual(sequence: int, hidden: int, element: int) -> Part:
    size = sequence * hidden
    return Part(work=(memory(float(size * (5 * element + 1)), backward=1.0),), saved_bytes=float(size))  # dropout, addition


def _table(sequence: int, vocabulary: int, hidden: int, element: int) -> Part:
    gather = Work(kind="gather", bytes=2.0 * sequence * hidden * element, rows=float(sequence), columns=hidden, backward=1.5)
    return Part(work=(gather,), parameters=vocabulary * hidden, saved_bytes=8.0 * sequence)


def _attention(sequence: int, target: int, hidden: int, element: int) -> Part:
    """Additive attention of every target token over the encoder's output."""
    square = float(sequence * target)
    score = Work(kind="attention", flops=2.0 * square * hidden, bytes=3 * square * hidden * element, rows=square, columns=1, depth=hidden)
    context = Work(
        kind="attention",
        flops=2.0 * square * hidden,
        bytes=(square + sequence * hidden) * element,
        rows=target,
        columns=hidden,
        depth=sequence,
    )
    return Part(
        work=(matmul(target, hidden, hidden, element), matmul(sequence, hidden, hidden, element), score, context),
        parameters=2 * hidden * hidden + 2 * hidden,
        saved_bytes=square * (hidden + 2) * element + 2.0 * (sequence + target) * hidden * element,
    )


def recurrent_translator(
    *,
    name: str,
    layers: int = 8,
    hidden: int = 1024,
    vocabulary: int = 32000,
    sequence: int = 50,
    target_sequence: int = 50,
    precision: Precision = "fp32",
) -> Graph:
    """GNMT: `layers` of encoder, the first in both directions, and of decoder, each fed the attention's context; nothing is tied."""
    if layers < 2 or min(hidden, vocabulary, sequence, target_sequence) < 1:
        raise JobError(f"{name}: layers must be at least 2 and every size positive")
    element = ELEMENT_BYTES[precision]
    encoder = _encoder(layers, hidden, vocabulary, sequence, element)
    decoder = _decoder(layers, hidden, vocabulary, sequence, target_sequence, element)
    return Graph(
        name=name,
        layers=(*encoder, *decoder, _softmax(hidden, vocabulary, target_sequence, element)),
        precision=precision,
        tokens_per_sample=sequence + target_sequence,
        input_bytes=8.0 * (sequence + 2 * target_sequence),
    )


def _encoder(layers: int, hidden: int, vocabulary: int, sequence: int, element: int) -> list[Layer]:
    stream = float(sequence * hidden * element)
    one_way = _lstm(sequence, hidden, hidden, element)
    first = _table(sequence, vocabulary, hidden, element) + one_way + one_way
    rows = [layer_of(first, name="encoder.0", signature="encoder.0", input_bytes=8.0 * sequence, output_bytes=2 * stream)]
    for i in range(1, layers):
        inputs = 2 if i == 1 else 1
        part = _lstm(sequence, inputs * hidden, hidden, element) + (_residual(sequence, hidden, element) if i > 1 else NOTHING)
        signature = "encoder.1" if i == 1 else "encoder"
        rows.append(layer_of(part, name=f"encoder.{i}", signature=signature, input_bytes=inputs * stream, output_bytes=stream))
    return rows


def _decoder(layers: int, hidden: int, vocabulary: int, sequence: int, target: int, element: int) -> list[Layer]:
    """The first layer asks the encoder; after it only the decoder's stream and the context cross a cut."""
    stream = float(target * hidden * element)
    attend = _attention(sequence, target, hidden, element)
    first = _table(target, vocabulary, hidden, element) + _lstm(target, 2 * hidden, hidden, element) + attend
    memory_bytes = float(sequence * hidden * element)
    rows = [layer_of(first, name="decoder.0", signature="decoder.0", input_bytes=memory_bytes, output_bytes=2 * stream)]
    for i in range(1, layers):
        part = _lstm(target, 2 * hidden, hidden, element) + _residual(target, hidden, element)
        last = i == layers - 1
        signature, output = ("decoder.last", stream) if last else ("decoder", 2 * stream)
        rows.append(layer_of(part, name=f"decoder.{i}", signature=signature, input_bytes=2 * stream, output_bytes=output))
    return rows


def _softmax(hidden: int, vocabulary: int, target: int, element: int) -> Layer:
    logits = float(target * vocabulary)
    work = (
        matmul(target, vocabulary, hidden, element, split="columns"),
        memory(logits * (element + 16), split="rows", backward=1.0),
    )
    part = Part(
        work=work,
        parameters=vocabulary * (hidden + 1),
        split_parameters=vocabulary * (hidden + 1),
        saved_bytes=target * hidden * element + 4.0 * logits,
        split_saved_bytes=4.0 * logits,
        tensor_bytes=target * hidden * element / 2 + 6.0 * target,
        tensor_reductions=2,
    )
    stream = float(target * hidden * element)
    return layer_of(part, name="head", signature="head", input_bytes=stream, output_bytes=0.0, tensor_units=vocabulary)
