"""Sizes: from a batch's tensors to the shape of every value that crosses a cut, so that receivers know what comes before it does."""

from typing import Any

import torch
from torch.utils import _pytree as pytree

from atoll.errors import JobError
from atoll.graph.capture import Captured
from atoll.graph.fake import plain_batch
from atoll.runtime.stage.program import Crossing

__all__ = ["Binding", "Sizes"]

Binding = tuple[int, ...]  # the values of the program's symbols, in the order of `Sizes.symbols`


class Sizes:
    """The symbols in a program's shapes, where in the batch they are read, and which of them are the number of samples."""

    def __init__(self, captured: Captured) -> None:
        program = captured.program
        values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
        self.weights = captured.loss_form.weights
        names = [name if isinstance(name, str) else None for name in program.graph_signature.user_inputs]
        self.names = [name for name in names if self.weights is None or name != self.weights.leaf]
        self._shapes: dict[str, tuple[Any, ...]] = {}  # leaf → its sizes: numbers and symbols
        self.dtypes: dict[str, torch.dtype] = {}  # of the leaves that are tensors
        self.symbols: list[Any] = []
        self._samples: set[Any] = set()
        others: set[Any] = set()
        for name in names:
            value = values.get(name) if name is not None else None
            if not isinstance(value, torch.Tensor):
                continue
            self.dtypes[str(name)] = value.dtype
            self._shapes[str(name)] = tuple(_expression(size) for size in value.shape)
            for size, expression in zip(tuple(value.shape), self._shapes[str(name)], strict=True):
                if not isinstance(expression, int) and expression.is_Symbol:
                    (self._samples if _hint(size) == captured.samples else others).add(expression)
                    if expression not in self.symbols:
                        self.symbols.append(expression)
        self._samples -= others
        self._known: dict[tuple[str, Binding], tuple[int, ...]] = {}
        self._paths = self._leaf_paths(captured)
        grows = self._samples and not any(0 in dims for dims in captured.fixed.values())
        self.fixed = None if grows else captured.samples  # the only number of samples the program runs on; None: any

    @staticmethod
    def _leaf_paths(captured: Captured) -> list[str]:
        """Where each leaf is in the batch, in the program's order."""
        example = pytree.tree_unflatten([0] * captured.program.call_spec.in_spec.num_leaves, captured.program.call_spec.in_spec)
        return [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(example[0][0])[0]]

    @property
    def follow_samples(self) -> bool:
        """Whether every size follows from the number of samples, so that a rank that reads no data knows them all."""
        return all(symbol in self._samples for symbol in self.symbols)

    def leaves(self, batch: Any, weights: torch.Tensor | None = None) -> dict[str, Any]:
        """The batch's leaves by the program's names, with the weights of the whole batch where the program takes them.

        What cannot be fed to the program is a `JobError`.
        """
        found = {pytree.keystr(path): leaf for path, leaf in pytree.tree_flatten_with_path(plain_batch(batch))[0]}
        missing = [path for path in self._paths if path not in found]
        if missing or len(found) != len(self._paths):
            extra = [path for path in found if path not in self._paths]
            what = f"batch{missing[0]} is missing" if missing else f"batch{extra[0]} is new"
            raise JobError(f"Job: collate_fn: {what}; every batch must have the same structure as the first")
        leaves = {name: found[path] for name, path in zip(self.names, self._paths, strict=True) if name is not None}
        for name, path in zip(self.names, self._paths, strict=True):
            if name is not None and name in self._shapes:
                self._check(path, self._shapes[name], self.dtypes[name], found[path])
        if self.weights is not None and weights is not None:
            leaves[self.weights.leaf] = weights
        return leaves

    @staticmethod
    def _check(path: str, expected: tuple[Any, ...], dtype: torch.dtype, leaf: Any) -> None:
        shape = tuple(leaf.shape)
        fits = len(shape) == len(expected) and all(not isinstance(e, int) or e == n for e, n in zip(expected, shape, strict=True))
        if not fits:
            wanted = ", ".join(str(e) if isinstance(e, int) else "any" for e in expected)
            dim = next((d for d, (e, n) in enumerate(zip(expected, shape, strict=False)) if isinstance(e, int) and e != n), 0)
            name = path[2:-2] if path.startswith("['") and path.count("[") == 1 else path
            advice = f"say that it varies with dynamic={{{name!r}: {dim}}}, or make every batch that size in `collate_fn` (pad or cut)"
            raise JobError(f"Job: collate_fn: batch{path} has shape {list(shape)}, but the job was captured with [{wanted}]; {advice}")
        if leaf.dtype != dtype:
            advice = "make it the same in every batch, in the data or in `collate_fn`"
            raise JobError(f"Job: collate_fn: batch{path} is of {leaf.dtype}, but the job was captured with {dtype}; {advice}")

    def take(self, leaves: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
        """Some samples of the leaves (all of the batch's or some); what does not count samples stays whole."""
        taken = dict(leaves)
        for name in taken.keys() & self._shapes.keys():
            for dim, size in enumerate(self._shapes[name]):
                if size in self._samples:
                    taken[name] = taken[name].narrow(dim, start, stop - start)
        return taken

    def bind(self, leaves: dict[str, Any]) -> Binding:
        """The symbols' values for these leaves."""
        values: dict[Any, int] = {}
        for name, shape in self._shapes.items():
            if self.weights is not None and name == self.weights.leaf:
                continue
            values.update((e, n) for e, n in zip(shape, leaves[name].shape, strict=True) if not isinstance(e, int) and e.is_Symbol)
        counts = sorted({values[symbol] for symbol in self._samples})
        if len(counts) > 1:
            raise JobError(
                f"Job: collate_fn: tensors of a batch count {counts[0]} and {counts[-1]} along dimensions that both were the number of "
                "samples when the job was captured; a length that varies must not happen to be that number in the first batch"
            )
        return tuple(values[symbol] for symbol in self.symbols)

    def of_samples(self, samples: int) -> Binding:
        """The symbols' values for a number of samples, where nothing else varies."""
        assert self.follow_samples
        return (samples,) * len(self.symbols)

    def of_piece(self, binding: Binding, samples: int) -> Binding:
        """The symbols' values for some of the samples of a batch with these."""
        return tuple(samples if symbol in self._samples else value for symbol, value in zip(self.symbols, binding, strict=True))

    def shape(self, crossing: Crossing, binding: Binding) -> tuple[int, ...]:
        """The shape of a value that crosses."""
        key = (crossing.name, binding)
        if key not in self._known:
            self._known[key] = tuple(self.number(size, binding) for size in crossing.shape)
        return self._known[key]

    def leaf_shape(self, name: str, binding: Binding) -> tuple[int, ...] | None:
        """The shape of one of the batch's leaves; None where it is no tensor."""
        shape = self._shapes.get(name)
        return None if shape is None else tuple(self.number(size, binding) for size in shape)

    def number(self, expression: Any, binding: Binding) -> int:
        """A size, or a number that is computed from sizes."""
        if isinstance(expression, (int, float, bool)):
            return expression  # type: ignore[return-value]
        return int(expression.xreplace(dict(zip(self.symbols, binding, strict=True))))

    def sample_dim(self, crossing: Crossing) -> int | None:
        """The dimension of a value that counts samples, so that it can be divided among lanes; None where there is no such dimension."""
        dims = [d for d, size in enumerate(crossing.shape) if not isinstance(size, int) and size in self._samples]
        return dims[0] if len(dims) == 1 else None

    def divisible(self, crossing: Crossing) -> bool:
        """Whether a value can be divided by samples, or has nothing to do with their number."""
        if self.sample_dim(crossing) is not None:
            return True
        return all(isinstance(size, int) or self._samples.isdisjoint(size.free_symbols) for size in crossing.shape)


def _expression(size: Any) -> Any:
    return size if isinstance(size, int) else int(size) if not size.node.expr.free_symbols else size.node.expr


def _hint(size: Any) -> Any:
    return size.node.hint
