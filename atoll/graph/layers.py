"""Operators → layers: the blocks a model repeats, and what stands before, between and after them.

A block is a child of a list of like modules that run one after another (`h.0`, `h.1`, …), or a module that is called again and again. Lists
inside blocks are opened as long as cutting there sends no more tensors than cutting around them, so a Swin stage is opened and a residual
bottleneck is not. A model that repeats nothing is divided by its child modules.
"""

import re
from collections import Counter, defaultdict
from dataclasses import dataclass

from torch import nn

from atoll.graph.liveness import Liveness
from atoll.graph.operators import OperatorTable

__all__ = ["Segment", "group_into_segments"]

Call = tuple[str, str]  # module path, which call of it


@dataclass(frozen=True)
class Segment:
    """A layer to be: operators `start` to `stop`."""

    name: str
    start: int
    stop: int


def _has_parts_and_parameters(module: nn.Module) -> bool:
    return next(module.children(), None) is not None and next(module.parameters(), None) is not None


def _lists_of_blocks(model: nn.Module) -> dict[str, set[str]]:
    """Containers that may hold blocks → paths of their children."""
    found: dict[str, set[str]] = {}
    for path, module in model.named_modules():
        children = dict(module.named_children())
        numbered = bool(children) and all(re.fullmatch(r"\D*\d+", name) for name in children)
        if not isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)) and not numbered:
            continue
        blocks = [child for child in children.values() if _has_parts_and_parameters(child)]
        kinds = Counter(type(block) for block in blocks)
        if blocks and (max(kinds.values()) >= 2 or len(blocks) == 1):
            found[path] = {f"{path}.{name}" if path else name for name in children}
    return found


class _Grouping:
    def __init__(self, table: OperatorTable, liveness: Liveness, model: nn.Module):
        self.table, self.liveness, self.model = table, liveness, model
        self.counts = liveness.crossing_counts()
        self.modules = dict(model.named_modules())

    def segments(self) -> list[Segment]:
        units = self._units_of(self._valid_containers())
        if len({unit for unit in units if unit is not None}) < 2:
            units = self._units_of_children()
        return self._named(self._merged(self._runs(units)))

    def _owners(self, children: set[str]) -> dict[int, Call]:
        owners: dict[int, Call] = {}
        cache: dict[tuple[Call, ...], Call | None] = {}
        for position, entry in enumerate(self.table.operators):
            if entry.calls not in cache:
                cache[entry.calls] = self._first_inside(entry.calls, children)
            owner = cache[entry.calls]
            if owner is not None:
                owners[position] = owner
        return owners

    @staticmethod
    def _first_inside(calls: tuple[Call, ...], children: set[str]) -> Call | None:
        for path, again in calls:
            parts = path.split(".")
            for length in range(1, len(parts) + 1):
                child = ".".join(parts[:length])
                if child in children:
                    return child, again if length == len(parts) else ""
        return None

    def _valid_containers(self) -> dict[str, dict[int, Call]]:
        """Containers whose children run one after another → owner by position."""
        valid: dict[str, dict[int, Call]] = {}
        candidates = _lists_of_blocks(self.model)
        candidates |= {f"{path}()": {path} for path in self._called_again()}
        for path, children in sorted(candidates.items(), key=lambda item: item[0].count(".")):
            owners = self._owners(children)
            if len(set(owners.values())) >= 2 and self._run_in_turn(owners) and self._worth_opening(path, owners, valid):
                valid[path] = owners
        return valid

    def _called_again(self) -> list[str]:
        calls: dict[str, set[str]] = defaultdict(set)
        for entry in self.table.operators:
            for path, again in entry.calls:
                calls[path].add(again)
        repeated = {
            path for path, times in calls.items() if len(times) > 1 and _has_parts_and_parameters(self.modules.get(path, nn.Identity()))
        }
        return [path for path in repeated if not any(path.startswith(other + ".") for other in repeated)]

    def _run_in_turn(self, owners: dict[int, Call]) -> bool:
        """Whether most blocks read what the block before them made; experts and attention heads do not."""
        order = list(dict.fromkeys(owners[position] for position in sorted(owners)))
        number = {call: index for index, call in enumerate(order)}
        first, last = min(owners), max(owners)
        reach: dict[object, int] = {}
        depends = [0] * len(order)
        for position in range(first, last + 1):
            node = self.table.operators[position].node
            mask = 0
            for value in node.all_input_nodes:
                mask |= reach.get(value, 0)
            owner = owners.get(position)
            if owner is not None:
                depends[number[owner]] |= mask
                mask |= 1 << number[owner]
            reach[node] = mask
        follows = sum(bool(depends[index] >> (index - 1) & 1) for index in range(1, len(order)))
        return follows * 2 >= len(order) - 1

    def _worth_opening(self, path: str, owners: dict[int, Call], valid: dict[str, dict[int, Call]]) -> bool:
        outer = [known for name, known in valid.items() if path.startswith(name.removesuffix("()") + ".")]
        if not outer:
            return True
        return self._tensors_at_starts(owners) <= max(self._tensors_at_starts(known) for known in outer)

    def _tensors_at_starts(self, owners: dict[int, Call]) -> int:
        """The most tensors that cross between two consecutive blocks."""
        most, before = 0, None
        for position in sorted(owners):
            if before is not None and owners[position] != before:
                most = max(most, self.counts[position])
            before = owners[position]
        return most

    def _units_of(self, containers: dict[str, dict[int, Call]]) -> list[Call | None]:
        """For every operator the innermost block it is in."""
        units: list[Call | None] = [None] * len(self.table.operators)
        for _, owners in sorted(containers.items(), key=lambda item: item[0].count(".")):
            for position, owner in owners.items():
                units[position] = owner
        return units

    def _units_of_children(self) -> list[Call | None]:
        paths: set[str] = set()

        def open_up(prefix: str, module: nn.Module) -> None:
            children = list(module.named_children())
            for name, child in children:
                path = f"{prefix}.{name}" if prefix else name
                opened = isinstance(child, (nn.Sequential, nn.ModuleList, nn.ModuleDict)) or len(children) == 1
                if opened and next(child.children(), None) is not None:
                    open_up(path, child)
                else:
                    paths.add(path)

        open_up("", self.model)
        owners = self._owners(paths)
        with_parameters = {owner for position, owner in owners.items() if self._has_parameters(position, position + 1)}
        return [owner if (owner := owners.get(position)) in with_parameters else None for position in range(len(self.table.operators))]

    def _runs(self, units: list[Call | None]) -> list[tuple[Call | None, int, int]]:
        """Maximal runs of one unit. Values that every stage can make again do not end a run."""
        runs: list[tuple[Call | None, int, int]] = []
        for position, unit in enumerate(units):
            node = self.table.operators[position].node
            if runs and (runs[-1][0] == unit or self.liveness.recomputable(node)):
                runs[-1] = (runs[-1][0], runs[-1][1], position + 1)
            else:
                runs.append((unit, position, position + 1))
        return runs

    def _has_parameters(self, start: int, stop: int) -> bool:
        operators = self.table.operators[start:stop]
        return any(value in self.table.parameters for entry in operators for value in entry.node.all_input_nodes)

    def _merged(self, runs: list[tuple[Call | None, int, int]]) -> list[tuple[Call | None, int, int]]:
        """Runs without parameters join the run before them (the first one the run after it)."""
        merged: list[tuple[Call | None, int, int]] = []
        for unit, start, stop in runs:
            if merged and (not self._has_parameters(start, stop) or (unit is not None and unit == merged[-1][0])):
                merged[-1] = (merged[-1][0], merged[-1][1], stop)
            elif merged and not self._has_parameters(merged[-1][1], merged[-1][2]):
                merged[-1] = (unit, merged[-1][1], stop)
            else:
                merged.append((unit, start, stop))
        return merged

    def _named(self, runs: list[tuple[Call | None, int, int]]) -> list[Segment]:
        taken: Counter[str] = Counter()
        segments = []
        for unit, start, stop in runs:
            name = unit[0] if unit is not None else self._name_of_largest(start, stop)
            taken[name] += 1
            segments.append(Segment(name if taken[name] == 1 else f"{name}@{taken[name] - 1}", start, stop))
        return segments

    def _name_of_largest(self, start: int, stop: int) -> str:
        """The module that uses the most parameters among operators outside blocks."""
        size: Counter[str] = Counter()
        for entry in self.table.operators[start:stop]:
            for value in entry.node.all_input_nodes:
                if value in self.table.parameters:
                    size[entry.module] += self.table.specs[value].bytes
        return size.most_common(1)[0][0] or "loss" if size else "loss"


def group_into_segments(table: OperatorTable, liveness: Liveness, model: nn.Module) -> list[Segment]:
    """Divide a program into layers."""
    return _Grouping(table, liveness, model).segments()
