"""Data: which samples make up a step, in which order they are visited, and data sets that need no download.

The training data is an endless row of positions. Of data with a length, position p is sample `Order(seed, p // length, length)[p % length]`
unless a sampler says otherwise; of a stream it is the sample that comes p-th, the stream being read again when it ends. Step k takes
positions k·batch_size up to (k+1)·batch_size. Every step has exactly `batch_size` samples, every epoch visits every sample once, and a
batch that begins in one epoch ends in the next.
"""

from atoll.data.datasets import Shapes, SortedDigits, StandardLibraryText
from atoll.data.device import Batch, to_device
from atoll.data.files import JsonLines, TextLines
from atoll.data.samples import BatchRequest, Dataset, Samples
from atoll.data.stream import StreamSamples

__all__ = [
    "Batch",
    "Dataset",
    "JsonLines",
    "BatchRequest",
    "Samples",
    "Shapes",
    "SortedDigits",
    "StandardLibraryText",
    "StreamSamples",
    "TextLines",
    "to_device",
]
