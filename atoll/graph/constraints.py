"""From annotations on modules to constraints on layers.

A layer is never cut inside, so an annotation that covers any module of a layer covers the whole layer: splitting one `Linear` of a block
asks for that block to be split. What then contradicts (two stages, or a replica and a split, in one layer) is an error of
`atoll.graph.contradictions.check_constraints`.
"""

from collections.abc import Sequence

from atoll.errors import AnnotationError
from atoll.graph.annotation import Annotation
from atoll.graph.graph import Constraint

__all__ = ["resolve"]

# who is outside when two annotations cover the same and neither was written inside the other
_OUTER_FIRST = {"pipeline": 0, "stage": 1, "replica": 2, "split": 3}


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
    return any(above.id == b.id for above in _written_around(a, annotations))


def _written_around(a: Annotation, annotations: Sequence[Annotation]) -> list[Annotation]:
    """The blocks an annotation was written in, innermost first."""
    by_id = {other.id: other for other in annotations}
    chain: list[Annotation] = []
    while above := by_id.get(a.parent):
        chain.append(above)
        a = above
    return chain


def _nesting(a: Annotation, annotations: Sequence[Annotation]) -> int:
    """How deep inside annotations that cover the same modules."""
    same = [b for b in annotations if b.id != a.id and _own_modules(b) == _own_modules(a)]
    return sum(_is_inside(a, b, annotations) for b in same)


def _depth(a: Annotation, parents: dict[str, Annotation | None]) -> int:
    above = parents[a.id]
    return 0 if above is None else 1 + _depth(above, parents)


def _orders(annotations: Sequence[Annotation]) -> dict[str, int]:
    """Position of each annotation among those of its kind, in the order they were written."""
    seen: dict[str, int] = {}
    orders = {}
    for a in sorted(annotations, key=lambda a: a.made):
        orders[a.id] = seen.get(a.kind, 0)
        seen[a.kind] = orders[a.id] + 1
    return orders


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
