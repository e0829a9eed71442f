"""Annotations are remembered on modules, resolved to layers, and contradictions name both lines."""

import copy
import inspect
import pickle
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import atoll
from atoll.errors import AnnotationError
from atoll.graph.annotations import Scope, annotations_of, default, pipeline, replica, split, stage
from atoll.graph.constraints import Annotation, check_constraints, resolve
from atoll.graph.graph import Constraint, Graph, Layer


def line(offset: int = 0) -> str:
    """`file:line` of the caller, as errors write it."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return f"test_annotations.py:{frame.f_back.f_lineno + offset}:"


def resolved(model: nn.Module, *, units: int = 8, uncuttable: tuple[int, ...] = ()) -> Graph:
    """The model's constraints when every child of the model is a layer."""
    modules = [frozenset(f"{name}.{path}".rstrip(".") for path, _ in child.named_modules()) for name, child in model.named_children()]
    layers = [Layer(name=name, tensor_units=units, cut=i not in uncuttable) for i, (name, _) in enumerate(model.named_children())]
    return Graph.from_layers("test", layers, constraints=resolve(annotations_of(model), modules))


def shape(graph: Graph) -> list[tuple[str, tuple[int, ...], int]]:
    return [(c.kind, c.layers, c.parent) for c in graph.constraints]


def linear() -> nn.Module:
    return nn.Linear(4, 4)


class Row(nn.Module):
    """Modules in a row, named a, b, c, …"""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        for name, module in zip("abcdefghijklmnop", modules, strict=False):
            self.add_module(name, module)


# ---------------------------------------------------------------- remembering


def test_modules_built_inside_are_marked_with_kind_devices_and_line() -> None:
    with split(4, uneven=False):
        inside = linear()
    where = line(-2)
    (found,) = annotations_of(Row(linear(), inside))
    assert (found.kind, found.devices, found.uneven, found.modules) == ("split", 4, False, frozenset({"b"}))
    assert where.startswith(found.where.rpartition("/")[2])


def test_function_marks_module_with_all_it_holds_and_returns_it() -> None:
    model = Row(nn.Sequential(linear(), nn.ReLU()), linear())
    assert stage(model.a) is model.a
    assert annotations_of(model)[0].modules == {"a", "a.0", "a.1"}


def test_modules_attached_inside_are_marked() -> None:
    first, second = linear(), linear()
    with stage():
        block = nn.Sequential(first, second)
    assert annotations_of(Row(block))[0].modules == {"a", "a.0", "a.1"} - {"a"}  # the container itself has no parameters


def test_copies_made_inside_are_marked() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    with stage():
        encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    (found,) = annotations_of(Row(layer, encoder))
    assert {path.split(".")[2] for path in found.modules if path.startswith("b.layers.")} == {"0", "1", "2"}
    assert not any(path.startswith("a") for path in found.modules)


def test_marks_survive_copying_moving_pickling_and_meta() -> None:
    with torch.device("meta"), stage():
        inside = linear()
    moved = nn.Sequential(Row(linear(), copy.deepcopy(inside)))
    again = pickle.loads(pickle.dumps(moved))
    assert [a.modules for a in annotations_of(again)] == [{"0.b"}]
    assert inside.weight.is_meta


def test_state_dict_and_repr_do_not_change() -> None:
    with stage():
        inside = linear()
    assert list(inside.state_dict()) == ["weight", "bias"]
    assert repr(inside) == repr(linear())


def test_exception_inside_closes_the_block() -> None:
    def fail() -> None:
        with stage():
            linear()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert annotations_of(linear()) == []


def test_other_threads_are_not_annotated() -> None:
    built: list[nn.Module] = []
    with stage():
        inside = linear()
        thread = threading.Thread(target=lambda: built.append(linear()))
        thread.start()
        thread.join()
    assert len(annotations_of(inside)) == 1
    assert annotations_of(built[0]) == []


def test_many_threads_annotate_at_once() -> None:
    found: list[list[Annotation]] = []

    def work(devices: int) -> None:
        for _ in range(20):
            with replica(devices):
                model = nn.Sequential(linear(), linear())
        found.append(annotations_of(model))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(a.devices for each in found for a in each) == list(range(1, 9))


def test_each_entry_is_a_new_annotation() -> None:
    rows = []
    scope = stage()
    for _ in range(3):
        with scope:
            rows.append(linear())
    assert len(annotations_of(Row(*rows))) == 3


def test_huggingface_model_built_inside() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=16)
    with torch.device("meta"), pipeline(micro_batches=4):
        model = transformers.AutoModelForCausalLM.from_config(config)
    split(model.lm_head, 2)
    outer, inner = annotations_of(model)
    assert (outer.kind, outer.micro_batches, inner.kind) == ("pipeline", 4, "split")
    assert {"transformer.wte", "transformer.h.1.mlp.c_fc", "lm_head"} <= outer.modules
    assert inner.modules == {"lm_head"}


def test_annotations_are_at_the_top_of_the_package_and_graph_does_not_load_torch() -> None:
    assert (atoll.replica, atoll.split, atoll.stage, atoll.pipeline, atoll.default) == (replica, split, stage, pipeline, default)
    program = "import sys, atoll.graph; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# ---------------------------------------------------------------- wrong calls


@pytest.mark.parametrize("wrong", [-1, True, 2.5, "two"])
def test_wrong_numbers_name_the_line(wrong: object) -> None:
    with pytest.raises(AnnotationError, match=line(1) + r" (replica|split): (devices must be|expected a)"):
        replica(wrong)  # type: ignore[call-overload]


def test_wrong_targets_name_the_line() -> None:
    with pytest.raises(AnnotationError, match=line(1) + r" stage: expected a torch.nn.Module, got str"):
        stage("encoder")  # type: ignore[call-overload]
    with pytest.raises(AnnotationError, match=line(1) + r" pipeline: micro_batches must be a whole number"):
        pipeline(micro_batches=-4)
    with pytest.raises(AnnotationError, match=line(1) + r" default: stage cannot be a default"):
        default(linear(), stage())


def test_empty_block_is_an_error() -> None:
    with pytest.raises(AnnotationError, match=line() + " stage: no module was built"), stage():
        pass


# ---------------------------------------------------------------- resolving


def test_replica_around_pipeline_around_stages() -> None:
    with replica(2), pipeline(micro_batches=8):
        with stage():
            a, b = linear(), linear()
        with stage():
            c = linear()
    graph = resolved(Row(a, b, c))
    assert shape(graph) == [("replica", (0, 1, 2), -1), ("pipeline", (0, 1, 2), 0), ("stage", (0, 1), 1), ("stage", (2,), 1)]
    assert [c.order for c in graph.constraints] == [0, 0, 0, 1]
    assert graph.constraints[1].micro_batches == 8
    check_constraints(graph, 4)


def test_pipeline_that_only_attaches_lies_around_stages_built_before() -> None:
    with stage():
        a = linear()
    with stage():
        b = linear()
    with pipeline(micro_batches=2):
        model = Row(a, b)
    assert shape(resolved(model)) == [("pipeline", (0, 1), -1), ("stage", (0,), 0), ("stage", (1,), 0)]


def test_nesting_of_equal_cover_follows_how_it_was_written() -> None:
    with stage(), replica(2):
        inner = linear()
    with replica(2), stage():
        outer = linear()
    assert shape(resolved(Row(inner))) == [("stage", (0,), -1), ("replica", (0,), 0)]
    assert shape(resolved(Row(outer))) == [("replica", (0,), -1), ("stage", (0,), 0)]


def test_different_parts_take_different_strategies() -> None:
    model = Row(linear(), linear(), linear())
    replica(model.a, 4)
    replica(model.b, 4)
    split(model.c, 4)
    graph = resolved(model)
    assert shape(graph) == [("replica", (0,), -1), ("replica", (1,), -1), ("split", (2,), -1)]
    check_constraints(graph, 4)


def test_part_of_a_layer_means_the_layer() -> None:
    model = Row(linear(), nn.Sequential(linear(), nn.ReLU(), linear()))
    split(model.b[0], 2)
    split(model.b[2], 2)
    graph = resolved(model)
    assert shape(graph) == [("split", (1,), -1), ("split", (1,), -1)]
    check_constraints(graph, 2)


def test_default_takes_what_has_neither_replica_nor_split() -> None:
    model = Row(linear(), linear(), linear(), linear())
    default(model, replica(2))
    split(model.d, 4)
    stage(model.a)
    stage(model.b)
    graph = resolved(model)
    kinds = [(c.kind, c.layers, graph.constraints[c.parent].layers if c.parent >= 0 else None) for c in graph.constraints]
    assert kinds[-3:] == [("replica", (0,), (0,)), ("replica", (1,), (1,)), ("replica", (2,), None)]
    check_constraints(graph, 4)


def test_layers_without_modules_join_the_stage_around_them() -> None:
    annotation = Annotation(kind="stage", where="t.py:1", id="x", modules=frozenset({"a", "c"}))
    (constraint,) = resolve([annotation], [frozenset({"a"}), frozenset(), frozenset({"c"}), frozenset()])
    assert constraint.layers == (0, 1, 2)


def test_shared_module_belongs_to_the_first() -> None:
    table = nn.Embedding(4, 4)
    model = Row(nn.Sequential(table, linear()), nn.Sequential(table, linear()))
    stage(model.a)
    stage(model.b)
    graph = resolved(model)
    assert shape(graph) == [("stage", (0,), -1), ("stage", (1,), -1)]
    check_constraints(graph, 2)


def test_annotation_of_unused_modules_is_an_error() -> None:
    model = Row(linear(), linear())
    stage(model.b)
    where = line(-1)
    with pytest.raises(AnnotationError, match=where + " stage covers no layer of the model: nothing in b"):
        resolve(annotations_of(model), [frozenset({"a"})])


# ---------------------------------------------------------------- contradictions


def contradiction(model: nn.Module, devices: int, *, units: int = 8, uncuttable: tuple[int, ...] = ()) -> str:
    with pytest.raises(AnnotationError) as caught:
        check_constraints(resolved(model, units=units, uncuttable=uncuttable), devices)
    return str(caught.value)


def test_stage_inside_stage() -> None:
    model = Row(linear(), linear())
    stage(model)
    stage(model.a)
    message = contradiction(model, 8)
    assert line(-3) in message
    assert line(-3) in message
    assert "a stage cannot lie inside a stage" in message


def test_overlapping_stages() -> None:
    model = Row(nn.Sequential(linear(), linear()), linear(), linear())
    with stage():
        nn.ModuleList([model.a[0], model.b])
    with stage():
        nn.ModuleList([model.b, model.c])
    message = contradiction(model, 8)
    assert line(-5) in message
    assert line(-4) in message
    assert "both cover layer 'b' and neither lies inside the other" in message


def test_two_stages_in_one_layer() -> None:
    model = Row(nn.Sequential(linear(), linear()), linear())
    with stage():
        nn.ModuleList([model.a[0]])
    with stage():
        nn.ModuleList([model.a[1], model.b])
    message = contradiction(model, 8)
    assert line(-5) in message
    assert line(-4) in message
    assert "a stage cannot lie inside a stage" in message


def test_stage_inside_split() -> None:
    with split(2):
        with stage():
            a = linear()
        b = linear()
    message = contradiction(Row(a, b), 8)
    assert line(-5) in message
    assert line(-5) in message
    assert "a stage cannot lie inside a split" in message


def test_split_inside_split() -> None:
    model = Row(linear(), linear())
    split(model, 4)
    split(model.a, 2)
    message = contradiction(model, 8)
    assert line(-3) in message
    assert line(-3) in message
    assert "a split cannot lie inside a split" in message


def test_replica_directly_inside_replica_but_not_with_a_stage_between() -> None:
    model = Row(linear(), linear())
    replica(model, 2)
    replica(model.a, 2)
    message = contradiction(model, 8)
    assert line(-3) in message
    assert line(-3) in message
    with replica(2):
        with stage(), replica(2):
            a = linear()
        with stage():
            b = linear()
    check_constraints(resolved(Row(a, b)), 6)
    assert "2 × 3 = 6" in contradiction(Row(a, b), 5)


def test_split_and_replica_in_one_layer() -> None:
    model = Row(nn.Sequential(linear(), linear()))
    split(model.a[0], 2)
    replica(model.a[1], 2)
    message = contradiction(model, 8)
    assert line(-3) in message
    assert line(-3) in message
    assert "both are in layer 'a', which is planned as one" in message


def test_two_splits_of_one_layer_disagree() -> None:
    model = Row(nn.Sequential(linear(), linear()))
    split(model.a[0], 2)
    split(model.a[1], 4)
    message = contradiction(model, 8)
    assert line(-3) in message
    assert line(-3) in message
    assert "give both the same number" in message


def test_split_across_a_stage_boundary() -> None:
    model = Row(linear(), linear(), linear())
    stage(model.a)
    with stage():
        nn.ModuleList([model.b, model.c])
    with split(2):
        nn.ModuleList([model.a, model.b])
    message = contradiction(model, 8)
    assert line(-5) in message
    assert line(-4) in message


def test_stage_that_is_not_contiguous() -> None:
    model = Row(linear(), linear(), linear())
    with stage():
        nn.ModuleList([model.a, model.c])
    alone = contradiction(model, 8)
    assert line(-3) in alone
    assert "layer 'b' runs between its layers" in alone
    stage(model.b)
    both = contradiction(model, 8)
    assert line(-7) in both
    assert line(-3) in both


def test_stages_out_of_order() -> None:
    model = Row(linear(), linear())
    stage(model.b)
    stage(model.a)
    message = contradiction(model, 8)
    assert line(-3) in message
    assert line(-3) in message
    assert "'a' runs before 'b'; write stages in the order they run" in message


def test_stages_where_the_model_cannot_be_cut() -> None:
    model = Row(linear(), linear())
    stage(model.a)
    stage(model.b)
    message = contradiction(model, 8, uncuttable=(0,))
    assert line(-3) in message
    assert line(-3) in message
    assert "cannot be cut between layer 0 and layer 1" in message


def test_more_stages_than_devices() -> None:
    model = Row(linear(), linear(), linear())
    stage(model.a)
    stage(model.b)
    stage(model.c)
    message = contradiction(model, 2)
    assert line(-4) in message
    assert line(-3) in message
    assert "need 3 devices, but there are only 2" in message


def test_replicas_of_a_pipeline_need_more_devices_than_there_are() -> None:
    with replica(3), pipeline():
        with stage():
            a = linear()
        with stage():
            b = linear()
    message = contradiction(Row(a, b), 5)
    assert message.count(line(-6)) == 2
    assert "3 copies of what lies inside need 3 × 2 = 6 devices, but there are only 5" in message


def test_replica_around_split_needs_the_product() -> None:
    model = Row(linear())
    replica(model, 4)
    split(model.a, 2)
    check_constraints(resolved(model), 8)
    message = contradiction(model, 7)
    assert line(-4) in message
    assert line(-4) in message
    assert "4 × 2 = 8" in message


def test_split_over_more_devices_than_there_are() -> None:
    model = Row(split(linear(), 8))
    assert line(-1) + " split over 8 devices needs 8 devices, but there is only 1" in contradiction(model, 1)


def test_split_of_an_indivisible_layer_with_uneven_forbidden() -> None:
    model = Row(split(linear(), 3, uneven=False))
    message = contradiction(model, 8)
    assert line(-2) in message
    assert "layer 'a' has 8 parts, which 3 does not divide" in message
    check_constraints(resolved(Row(split(linear(), 3))), 8)


def test_split_of_what_cannot_be_split() -> None:
    model = Row(split(linear(), 2))
    where = line(-1)
    assert where + " split over 2 devices: layer 'a' cannot be split" in contradiction(model, 8, units=1)
    assert "has only 8 parts" in contradiction(Row(split(linear(), 16)), 16)


def test_pipelines_with_different_micro_batches() -> None:
    model = Row(linear(), linear())
    pipeline(model.a, micro_batches=4)
    pipeline(model.b, micro_batches=8)
    message = contradiction(model, 8)
    assert line(-3) in message
    assert line(-3) in message


def test_pipeline_without_stages_is_free() -> None:
    model = Row(linear(), linear())
    pipeline(model, micro_batches=4)
    check_constraints(resolved(model), 1)


def test_constraints_written_by_hand_are_checked_too() -> None:
    layers = [Layer(name="x"), Layer(name="y")]
    wrong = [
        Constraint(kind="stage", layers=(5,)),
        Constraint(kind="stage", layers=()),
        Constraint(kind="stage", layers=(0,), parent=0),
    ]
    for constraint in wrong:
        with pytest.raises(AnnotationError, match="constraint: stage 0"):
            check_constraints(Graph.from_layers("g", layers, constraints=(constraint,)), 2)


# ---------------------------------------------------------------- random nestings

STRATEGIES = {"replica": lambda: replica(2), "split": lambda: split(2), "stage": stage, "pipeline": pipeline}
NODES = st.tuples(st.sampled_from(sorted(STRATEGIES)), st.booleans())
TREES = st.recursive(st.just([]), lambda inner: st.lists(st.tuples(NODES, inner), min_size=1, max_size=3), max_leaves=12)
Tree = list[tuple[tuple[str, bool], "Tree"]]


def build(tree: Tree, rows: list[nn.Module]) -> None:
    """Nested blocks; a block without blocks inside builds a layer, others do when their flag says so (else both cover the same)."""
    if not tree:
        rows.append(linear())
    for (kind, builds), inner in tree:
        scope: Scope = STRATEGIES[kind]()
        with scope:
            if builds:
                rows.append(linear())
            build(inner, rows)


def chains(tree: Tree, above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Kinds around and including each annotation of the tree."""
    found = []
    for (kind, _), inner in tree:
        found += [(*above, kind), *chains(inner, (*above, kind))]
    return found


def lawful(chain: tuple[str, ...]) -> bool:
    """The rules of nesting said once more, for one annotation and those around it."""
    *above, kind = chain
    if "split" in above:
        return False
    if kind in ("stage", "pipeline"):
        return "stage" not in above and (kind == "stage" or "pipeline" not in above)
    if kind == "replica" and "replica" in above:
        last = len(above) - 1 - above[::-1].index("replica")
        return "stage" in above[last:]
    return True


@settings(max_examples=150, deadline=None)
@given(TREES)
def test_any_nesting_resolves_as_written_and_is_refused_exactly_when_unlawful(tree: Tree) -> None:
    rows: list[nn.Module] = []
    build(tree, rows)
    graph = Graph.from_layers("g", [Layer(name=f"{i}", tensor_units=8) for i in range(len(rows))], constraints=_resolve_rows(rows))
    written = sorted(chains(tree))
    assert sorted(_chain(graph.constraints, c) for c in graph.constraints) == written
    if all(lawful(chain) for chain in written):
        check_constraints(graph, 10**9)
    else:
        with pytest.raises(AnnotationError, match=r"test_annotations.py:\d+: .* contradicts .*test_annotations.py:\d+: "):
            check_constraints(graph, 10**9)


def _resolve_rows(rows: list[nn.Module]) -> tuple[Constraint, ...]:
    return resolve(annotations_of(nn.ModuleList(rows)), [frozenset({str(i)}) for i in range(len(rows))])


def _chain(constraints: tuple[Constraint, ...], constraint: Constraint) -> tuple[str, ...]:
    above = _chain(constraints, constraints[constraint.parent]) if constraint.parent >= 0 else ()
    return (*above, constraint.kind)
