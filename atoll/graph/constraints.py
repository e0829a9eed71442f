"""Annotations on modules become constraints on layers, and are checked against each other. Without torch: planning need not load it.

A layer is never cut inside, so an annotation that covers any module of a layer covers the whole layer: splitting one `Linear` of a block
asks for that block to be split. What then contradicts (two stages, or a replica and a split, in one layer) is an error of
`check_constraints`, which names the lines that contradict each other.

What may lie inside what: a replica around pipelines, stages and splits; a pipeline around stages, replicas and splits; a stage around
replicas and splits. Replicas inside a replica need a stage between them; nothing lies inside a split; stages and pipelines do not nest.
Layers between two stages that belong to neither may join either.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations, count, pairwise
from typing import Literal

import msgspec

from atoll.errors import AnnotationError
from atoll.graph.graph import Constraint, Graph, Layer

__all__ = ["Annotation", "Kind", "check_constraints", "describe", "resolve"]

Kind = Literal["replica", "split", "stage", "pipeline"]

# who is outside when two annotations cover the same and neither was written inside the other
_OUTER_FIRST = {"pipeline": 0, "stage": 1, "replica": 2, "split": 3}


class Annotation(msgspec.Struct, frozen=True, kw_only=True):
    """One demand, and the modules of a model it covers (`modules` is filled by `annotations_of`)."""

    kind: Kind
    devices: int = 0  # 0: free
    micro_batches: int = 0  # pipeline only; 0: free
    uneven: bool = True  # split only
    is_default: bool = False  # covers what no replica or split covers
    where: str = ""  # "train.py:12"
    id: str = ""
    parent: str = ""  # id of the block it was made in
    made: int = 0  # later annotations have larger numbers
    modules: frozenset[str] = frozenset()  # paths; a module that is reached by several paths is here with all of them
    shared: frozenset[str] = frozenset()  # of those, reached by several paths


def resolve(annotations: Sequence[Annotation], layer_modules: Sequence[frozenset[str]]) -> tuple[Constraint, ...]:
    """The annotations as constraints on layers; `layer_modules[i]` are the paths of the modules layer i's parameters belong to.

    Outer constraints come before inner ones. Raises when an annotation covers nothing that is a layer, or when two overlap without one
    being inside the other.
    """
    wanted = [a for a in annotations if not a.is_default]
    parents = {a.id: _parent(a, wanted) for a in wanted}
    ordered = sorted(wanted, key=lambda a: (_depth(a, parents), a.made))
    index = {a.id: i for i, a in enumerate(ordered)}
    orders = _orders(wanted)
    constraints = []
    for a in ordered:
        above = parents[a.id]
        constraints.append(_constraint(a, _layers(a, layer_modules), order=orders[a.id], parent=index[above.id] if above else -1))
    for a in annotations:
        if a.is_default:
            constraints += _rest(a, constraints, layer_modules)
    return tuple(constraints)


def _constraint(a: Annotation, layers: tuple[int, ...], *, order: int, parent: int) -> Constraint:
    return Constraint(
        kind=a.kind,
        layers=layers,
        devices=a.devices,
        micro_batches=a.micro_batches,
        uneven=a.uneven,
        order=order,
        parent=parent,
        where=a.where,
    )


def _own_modules(a: Annotation) -> frozenset[str]:
    """Modules shared between parts of the model say nothing about nesting, unless there are no others."""
    return a.modules - a.shared or a.modules


def _layers(a: Annotation, layer_modules: Sequence[frozenset[str]]) -> tuple[int, ...]:
    """Layers with a module of the annotation; for stages and pipelines also the ones without any module between them."""
    own = _own_modules(a)
    hit = {i for i, modules in enumerate(layer_modules) if modules & own}
    if not hit:
        hit = {i for i, modules in enumerate(layer_modules) if modules & a.modules}
    if not hit:
        named = ", ".join(sorted(a.modules)[:3])
        raise AnnotationError(
            f"{a.where}: {a.kind} covers no layer of the model: nothing in {named or 'it'} has parameters that the loss uses"
        )
    if a.kind in ("stage", "pipeline"):
        hit |= {i for i in range(min(hit), max(hit)) if not layer_modules[i]}
    return tuple(sorted(hit))


def _parent(a: Annotation, others: Sequence[Annotation]) -> Annotation | None:
    """The innermost annotation around this one."""
    around = [b for b in others if b.id != a.id and _is_inside(a, b, others)]
    return min(around, key=lambda b: (len(_own_modules(b)), -_nesting(b, others)), default=None)


def _is_inside(a: Annotation, b: Annotation, annotations: Sequence[Annotation]) -> bool:
    """Whether `a` lies inside `b`: by what they cover, and where that is equal by how they were written."""
    mine, theirs = _own_modules(a), _own_modules(b)
    if mine != theirs:
        return mine < theirs
    if _written_inside(a, b, annotations) or _written_inside(b, a, annotations):
        return _written_inside(a, b, annotations)
    return (_OUTER_FIRST[a.kind], a.made) > (_OUTER_FIRST[b.kind], b.made)


def _written_inside(a: Annotation, b: Annotation, annotations: Sequence[Annotation]) -> bool:
    """Whether one of the blocks `a` was written in is `b`."""
    by_id = {other.id: other for other in annotations}
    while above := by_id.get(a.parent):
        if above.id == b.id:
            return True
        a = above
    return False


def _nesting(a: Annotation, annotations: Sequence[Annotation]) -> int:
    """How deep inside annotations that cover the same modules."""
    same = [b for b in annotations if b.id != a.id and _own_modules(b) == _own_modules(a)]
    return sum(_is_inside(a, b, annotations) for b in same)


def _depth(a: Annotation, parents: dict[str, Annotation | None]) -> int:
    above = parents[a.id]
    return 0 if above is None else 1 + _depth(above, parents)


def _orders(annotations: Sequence[Annotation]) -> dict[str, int]:
    """Position of each annotation among those of its kind, in the order they were written."""
    counts: dict[str, Iterator[int]] = defaultdict(count)
    return {a.id: next(counts[a.kind]) for a in sorted(annotations, key=lambda a: a.made)}


def _rest(a: Annotation, constraints: Sequence[Constraint], layer_modules: Sequence[frozenset[str]]) -> list[Constraint]:
    """The default strategy for layers without replica or split: one constraint for each stage (or pipeline, or none) they are in."""
    taken = {i for c in constraints if c.kind in ("replica", "split") for i in c.layers}
    groups: dict[int, list[int]] = {}
    for i in _layers(a, layer_modules):
        if i not in taken:
            around = [n for n, c in enumerate(constraints) if c.kind in ("stage", "pipeline") and i in c.layers]
            groups.setdefault(around[-1] if around else -1, []).append(i)
    order = sum(c.kind == a.kind for c in constraints)
    return [_constraint(a, tuple(layers), order=order + n, parent=parent) for n, (parent, layers) in enumerate(groups.items())]


_CUTTING = ("stage", "pipeline")
_ROOM = {"replica": ("pipeline", "stage", "split"), "pipeline": ("stage", "replica", "split"), "stage": ("replica", "split"), "split": ()}


def describe(constraint: Constraint) -> str:
    """`"train.py:12: split over 4 devices"`."""
    words = {
        "replica": f"replica({constraint.devices or ''})",
        "split": f"split over {constraint.devices or 'any number of'} devices",
        "stage": f"stage {constraint.order}",
        "pipeline": "pipeline" + (f" of {constraint.micro_batches} micro-batches" if constraint.micro_batches else ""),
    }
    return f"{constraint.where or 'constraint'}: {words[constraint.kind]}"


def check_constraints(graph: Graph, device_count: int) -> None:
    """Raise AnnotationError at the first contradiction in `graph.constraints`, naming both lines."""
    nest = _Nest(graph)
    nest.check_nesting()
    _check_stages(graph, [c for c in graph.constraints if c.kind == "stage"])
    _check_micro_batches(graph.constraints)
    for constraint in graph.constraints:
        if constraint.kind == "split":
            _check_split(graph, constraint)
    nest.check_devices(device_count)


def _contradiction(a: Constraint, b: Constraint, reason: str) -> AnnotationError:
    return AnnotationError(f"{describe(a)} contradicts {describe(b)}: {reason}")


class _Nest:
    """Which constraint lies inside which."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.constraints = graph.constraints
        self.covers = [frozenset(c.layers) for c in graph.constraints]
        for index, constraint in enumerate(graph.constraints):
            _check_indices(graph, index, constraint)
        self.outside: list[list[int]] = [[] for _ in self.constraints]  # of each, everything around it
        for a, b in combinations(range(len(self.constraints)), 2):
            self._relate(a, b)
        self.parents = [max(around, key=lambda i: len(self.outside[i]), default=-1) for around in self.outside]

    def _ancestors(self, index: int) -> Iterator[int]:
        """Enclosing constraints as written down; a parent always comes before its children, so this ends."""
        while (above := self.constraints[index].parent) >= 0:
            yield above
            index = above

    def _relate(self, a: int, b: int) -> None:
        """Note that one lies inside the other, that they are apart, or raise."""
        if a in self._ancestors(b):
            self.outside[b].append(a)
        elif b in self._ancestors(a):
            self.outside[a].append(b)
        elif self.covers[a] & self.covers[b]:
            self._relate_by_layers(a, b)

    def _relate_by_layers(self, a: int, b: int) -> None:
        one, other = self.constraints[a], self.constraints[b]
        if one.kind == other.kind and one.kind not in _CUTTING:
            if (one.devices, one.uneven) != (other.devices, other.uneven):
                raise _contradiction(one, other, f"both are in {self._place(a, b)}, which is planned as one; give both the same number")
            return
        if {one.kind, other.kind} == {"replica", "split"}:
            raise _contradiction(
                one, other, f"both are in {self._place(a, b)}, which is planned as one; put one inside the other or use one"
            )
        if not (self.covers[a] <= self.covers[b] or self.covers[b] <= self.covers[a]):
            raise _contradiction(one, other, f"both cover {self._place(a, b)} and neither lies inside the other")
        outer, inner = sorted((a, b), key=lambda i: (-len(self.covers[i]), _OUTER_FIRST[self.constraints[i].kind]))
        self.outside[inner].append(outer)

    def _place(self, a: int, b: int) -> str:
        first = min(self.covers[a] & self.covers[b])
        return f"layer {self.graph.layers[first].name!r}"

    def check_nesting(self) -> None:
        """Raise when something lies inside what has no room for it."""
        for inner, around in enumerate(self.outside):
            for outer in around:
                kinds = self.constraints[outer].kind, self.constraints[inner].kind
                if kinds == ("replica", "replica"):
                    self._check_replicas(outer, inner)
                elif kinds[1] not in _ROOM[kinds[0]]:
                    reason = f"a {kinds[1]} cannot lie inside a {kinds[0]}"
                    raise _contradiction(self.constraints[inner], self.constraints[outer], reason)

    def _check_replicas(self, outer: int, inner: int) -> None:
        between = [i for i in self.outside[inner] if self.constraints[i].kind == "stage" and outer in self.outside[i]]
        if not between:
            reason = "a replica directly inside a replica; write one with the product of both, or put stages between them"
            raise _contradiction(self.constraints[inner], self.constraints[outer], reason)

    def check_devices(self, device_count: int) -> None:
        """Raise when the constraints together need more devices than there are."""
        roots = [i for i, parent in enumerate(self.parents) if parent < 0]
        needed = self._together(roots)
        if needed > device_count:
            raise AnnotationError(f"{self._blame(roots, device_count)}, but there {_are(device_count)}")

    def _children(self, index: int) -> list[int]:
        return [i for i, parent in enumerate(self.parents) if parent == index]

    def _has_stage(self, index: int) -> bool:
        return self.constraints[index].kind == "stage" or any(self._has_stage(child) for child in self._children(index))

    def _together(self, indices: Sequence[int]) -> int:
        """Devices that constraints side by side need: stages have their own, other parts may use the same ones."""
        staged = sum(self._needs(i) for i in indices if self._has_stage(i))
        return max([staged, *(self._needs(i) for i in indices if not self._has_stage(i))], default=0)

    def _needs(self, index: int) -> int:
        constraint = self.constraints[index]
        inside = max(1, self._together(self._children(index)))
        if constraint.kind == "replica":
            return max(1, constraint.devices) * inside
        if constraint.kind == "split":
            return constraint.devices or 2
        return inside

    def _blame(self, roots: Sequence[int], device_count: int) -> str:
        """The smallest part of the tree that already needs too many, in words."""
        for index in roots:
            if self._needs(index) > device_count:
                return self._blame_one(index, device_count)
        staged = [i for i in roots if self._has_stage(i)]
        first, last = self.constraints[staged[0]], self.constraints[staged[-1]]
        return f"{describe(first)} contradicts {describe(last)}: together they and what lies between need {self._together(roots)} devices"

    def _blame_one(self, index: int, device_count: int) -> str:
        constraint, children = self.constraints[index], self._children(index)
        inside = self._together(children)
        if constraint.kind == "split" or not children:
            return f"{describe(constraint)} needs {self._needs(index)} devices"
        if inside > device_count or constraint.kind != "replica":
            return self._blame(children, device_count)
        widest = self.constraints[max(children, key=self._needs)]
        sum_ = f"{constraint.devices} × {inside} = {self._needs(index)}"
        return f"{describe(constraint)} contradicts {describe(widest)}: {constraint.devices} copies of what lies inside need {sum_} devices"


def _are(count: int) -> str:
    return "is only 1" if count == 1 else f"are only {count}"


def _check_indices(graph: Graph, index: int, constraint: Constraint) -> None:
    last = len(graph.layers) - 1
    if not constraint.layers or min(constraint.layers) < 0 or max(constraint.layers) > last:
        raise AnnotationError(f"{describe(constraint)} covers layers {constraint.layers}, but the graph has layers 0 to {last}")
    if not -1 <= constraint.parent < index:
        raise AnnotationError(f"{describe(constraint)} is constraint {index} and has parent {constraint.parent}; outer ones come first")


def _check_stages(graph: Graph, stages: Sequence[Constraint]) -> None:
    for stage in stages:
        _check_contiguous(graph, stage, stages)
    for earlier, later in pairwise(sorted(stages, key=lambda stage: stage.order)):
        if min(later.layers) < min(earlier.layers):
            names = graph.layers[min(later.layers)].name, graph.layers[min(earlier.layers)].name
            raise _contradiction(later, earlier, f"{names[0]!r} runs before {names[1]!r}; write stages in the order they run")
        lowest, highest = max(earlier.layers) + 1, min(later.layers)
        if not any(lowest <= cut <= highest for cut in graph.cuts):
            raise _contradiction(earlier, later, f"the model cannot be cut between layer {lowest - 1} and layer {highest}")


def _check_contiguous(graph: Graph, stage: Constraint, stages: Sequence[Constraint]) -> None:
    missing = sorted(set(range(min(stage.layers), max(stage.layers))) - set(stage.layers))
    if not missing:
        return
    name = graph.layers[missing[0]].name
    other = next((other for other in stages if missing[0] in other.layers), None)
    if other is not None:
        raise _contradiction(stage, other, f"layer {name!r} of the latter lies between layers of the former")
    raise AnnotationError(f"{describe(stage)} is not contiguous: layer {name!r} runs between its layers; include it or make two stages")


def _check_micro_batches(constraints: Sequence[Constraint]) -> None:
    """A plan has one number of micro-batches."""
    counted = [c for c in constraints if c.kind == "pipeline" and c.micro_batches]
    for a, b in pairwise(counted):
        if a.micro_batches != b.micro_batches:
            raise _contradiction(a, b, "a plan has one number of micro-batches; give both the same")


def _check_split(graph: Graph, split: Constraint) -> None:
    layers = [graph.layers[i] for i in split.layers]
    if all(not _parts(layer) for layer in layers):
        raise AnnotationError(f"{describe(split)}: layer {layers[0].name!r} cannot be split; use replica for it")
    if not split.devices:
        return
    for layer in layers:
        parts, what = _parts(layer), f"{describe(split)}: layer {layer.name!r}"
        if 0 < parts < split.devices:
            raise AnnotationError(f"{what} has only {parts} parts to divide")
        if parts % split.devices and not split.uneven:
            raise AnnotationError(f"{what} has {parts} parts, which {split.devices} does not divide; allow uneven=True or choose a divisor")


def _parts(layer: Layer) -> int:
    """Into how many equal parts a layer comes apart: its experts, or where it has none its tensors; 0 when it does not."""
    parts = layer.experts or layer.tensor_units
    return parts if parts > 1 else 0
