"""Randomness without state: every random decision is a function of the job's seed and of what is being decided.

Any worker can therefore compute the order of the data, the weights a model starts from or the dropout of a micro-batch without having
seen what came before, and redoing work anywhere gives the same numbers.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, overload

import numpy
import torch

__all__ = ["Order", "generator_states", "mix", "own_randomness", "seed_everything"]

_MASK = 2**64 - 1
_ROUNDS = 6


def mix(*integers: int) -> int:
    """A well-mixed 64-bit integer that depends on every argument and on their order.

    The finaliser is SplitMix64's (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
    """
    state = 0
    for integer in integers:
        state = (state + 0x9E3779B97F4A7C15 + (integer & _MASK)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


class Order(Sequence[int]):
    """The order in which an epoch visits `length` samples: a permutation with random access in constant memory.

    A Feistel network permutes the smallest power of two that holds `length`; a value that falls outside is sent through again until it
    falls inside (cycle walking), which takes less than one extra turn on average.
    """

    def __init__(self, seed: int, epoch: int, length: int) -> None:
        assert length >= 0
        self.seed, self.epoch, self.length = seed, epoch, length

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return f"Order(seed={self.seed}, epoch={self.epoch}, length={self.length})"

    @overload
    def __getitem__(self, position: int) -> int: ...
    @overload
    def __getitem__(self, position: slice) -> list[int]: ...
    def __getitem__(self, position: int | slice) -> int | list[int]:
        if isinstance(position, slice):
            return [self[i] for i in range(*position.indices(self.length))]
        if position < 0:
            position += self.length
        if not 0 <= position < self.length:
            raise IndexError(f"position {position} of an order of {self.length} samples")
        index = self._permute(position)
        while index >= self.length:
            index = self._permute(index)
        return index

    @cached_property
    def _keys(self) -> tuple[int, ...]:
        return tuple(mix(self.seed, self.epoch, turn) for turn in range(2 * _ROUNDS))

    def _permute(self, value: int) -> int:
        bits = max(2, (self.length - 1).bit_length())
        low_bits = bits // 2
        low_mask, high_mask = (1 << low_bits) - 1, (1 << (bits - low_bits)) - 1
        low, high = value & low_mask, value >> low_bits
        for turn in range(0, 2 * _ROUNDS, 2):
            low ^= mix(self._keys[turn] ^ high) & low_mask
            high ^= mix(self._keys[turn + 1] ^ low) & high_mask
        return high << low_bits | low


def seed_everything(key: int, *, devices: bool = True) -> None:
    """Seed the generators of PyTorch, NumPy and Python. `devices=False` leaves accelerators alone, which is much cheaper."""
    if devices:
        torch.manual_seed(key)
    else:
        torch.default_generator.manual_seed(key)
    numpy.random.seed(key & 0xFFFFFFFF)
    random.seed(key)


def generator_states() -> tuple[object, ...]:
    """Of Python's, NumPy's and PyTorch's CPU generators: equal as long as nobody draws from them or seeds them."""
    of_numpy: Any = numpy.random.get_state(legacy=False)
    keys = of_numpy["state"]["key"].tobytes(), of_numpy["state"]["pos"], of_numpy["has_gauss"]
    return random.getstate(), keys, torch.default_generator.get_state().numpy().tobytes()


@contextmanager
def own_randomness(key: int | None = None, *, devices: bool = True) -> Iterator[None]:
    """Inside, generators may be seeded at will (and are, when a key is given); afterwards the caller's streams go on as if nothing was.

    `devices=False` leaves accelerators alone.
    """
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    device_type, count = _accelerators() if devices else ("cuda", 0)
    with torch.random.fork_rng(range(count), device_type=device_type):
        try:
            if key is not None:
                seed_everything(key, devices=devices)
            yield
        finally:
            random.setstate(python_state)
            numpy.random.set_state(numpy_state)


def _accelerators() -> tuple[str, int]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type == "mps":  # PyTorch cannot fork the generator of an Apple GPU
        return "cuda", 0
    return accelerator.type, torch.accelerator.device_count()
