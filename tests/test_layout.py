"""The shape of the project: imports point one way along the road, modules say what they are for, public names change on purpose."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import atoll
from atoll.plan.modes import mode_names

ROOT = Path(atoll.__file__).parent
ROAD = (
    "errors", "blame", "units", "randomness", "events", "data", "callbacks", "model_identity", "weights", "built_optimizer", "job",
    "script", "hugging_face", "graph", "cluster", "codec", "privacy", "collaboration", "plan", "cost", "planner", "fabric", "control",
    "runtime",
    "simulate", "lab", "watch", "loop", "cli",
)  # fmt: skip
"""A file or folder imports only from those before it: docs/layout.md."""

LATER_ON_PURPOSE = {("job", "loop")}
"""`Job.run()` is where the user starts, so it loads what runs and shows the job; inside the function, when it is called."""

MODULES = sorted(path for path in ROOT.rglob("*.py"))

NAMED_TWICE = {
    "main": "what `python -m` of a module runs",
    "diff": "the command `atoll diff` and what it calls",
    "export": "the command `atoll export` and what it calls",
    "plan": "the command `atoll plan` and what it calls",
    "run": "the command `atoll run`, and running any command",
}
"""Public classes and functions that may be defined in several modules, and why. All others have one meaning."""


@cache
def tree_of(path: Path) -> ast.Module:
    """What a file says."""
    return ast.parse(path.read_text(encoding="utf-8"))


def place(path: Path) -> str:
    """Where on the road a file of the package lies."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> list[tuple[int, str]]:
    """Lines and modules of all imports of Atoll's own, those inside functions included."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide the direction"
            module = node.module or ""
            found += [(node.lineno, f"{module}.{alias.name}" if module == "atoll" else module) for alias in node.names]
    return [(line, module) for line, module in found if module.split(".")[0] == "atoll"]


def wrong_way(path: Path) -> list[str]:
    here = place(path)
    wrong = []
    for line, module in imports(tree_of(path)):
        there = module.split(".")[1] if "." in module else "__init__"
        if here == "__init__" or there == here or (here, there) in LATER_ON_PURPOSE:
            continue
        if there not in ROAD or ROAD.index(there) > ROAD.index(here):
            wrong.append(f"{path.relative_to(ROOT.parent)}:{line}: {here} must not import {module}")
    return wrong


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_says_what_it_is_for_and_imports_along_the_road(path: Path) -> None:
    tree = tree_of(path)
    assert ast.get_docstring(tree), f"{path}: a module opens by saying what it is for"
    assert place(path) == "__init__" or place(path) in ROAD, f"{path}: not on the road of docs/layout.md"
    wrong = wrong_way(path)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_functions_stay_small_and_public_names_are_documented(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 80, f"{path}:{node.lineno}: {node.name} is {length} lines long"
    for node in tree_of(path).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            overload = any(isinstance(decorator, ast.Name) and decorator.id == "overload" for decorator in node.decorator_list)
            assert overload or ast.get_docstring(node), f"{path}:{node.lineno}: {node.name} has no docstring"


def test_a_public_name_has_one_meaning() -> None:
    """A reader who finds a noun in one module may take it for the same noun in another."""
    places: dict[str, set[str]] = {}
    for path in MODULES:
        for node in tree_of(path).body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                places.setdefault(node.name, set()).add(str(path.relative_to(ROOT)))
    twice = {name: sorted(where) for name, where in places.items() if len(where) > 1}
    assert not {name: where for name, where in twice.items() if name not in NAMED_TWICE}, "rename one, or say in NAMED_TWICE why not"
    assert not NAMED_TWICE.keys() - twice.keys(), "defined once by now: leave them out of NAMED_TWICE"


SILENT = ("control", "fabric", "runtime")
"""What runs emits events; whoever watches shows them. No line is printed there."""


def printing(tree: ast.AST) -> list[int]:
    """Lines where `print` is called or handed on."""
    return [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "print"]


@pytest.mark.parametrize("path", [path for path in MODULES if place(path) in SILENT], ids=lambda path: str(path.relative_to(ROOT)))
def test_what_runs_emits_events_and_prints_nothing(path: Path) -> None:
    lines = printing(tree_of(path))
    assert not lines, f"{path}: lines {lines} print; emit an event (docs/events.md) and let the terminal show it"


def test_the_test_of_directions_sees_a_wrong_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "atoll" / "cost").mkdir(parents=True)
    bad = tmp_path / "atoll" / "cost" / "bad.py"
    bad.write_text(
        "def f():\n    from atoll.planner import search\nimport atoll.cli\nfrom atoll import watch\nfrom atoll.plan import Plan\n"
    )
    monkeypatch.setitem(globals(), "ROOT", tmp_path / "atoll")
    wrong = {line.split(": ")[1] for line in wrong_way(bad)}
    assert wrong == {f"cost must not import atoll.{name}" for name in ("cli", "watch", "planner")}


def test_docs_and_road_agree() -> None:
    package, _ = (ROOT.parent / "docs" / "layout.md").read_text(encoding="utf-8").split("Beside the package:")
    named = [line.split("`")[1] for line in package.splitlines() if line.startswith("| `")]
    assert [name.removesuffix("/").removesuffix(".py") for name in named] == list(ROAD)


def test_the_public_names_change_on_purpose() -> None:
    assert atoll.__all__ == [
        *["AtollError", "BestCheckpoint", "Cluster", "EarlyStopping", "Graph", "Job", "Part", "Plan"],
        *["Receive", "RunHandle", "RunResult", "Snapshot"],
        *[
            "StopTraining",
            "capture",
            "collaborate",
            "default",
            "from_trainer",
            "load_cluster",
            "load_job",
            "pipeline",
            "replica",
            "split",
            "stage",
            "step",
            "top_k",
        ],
    ]


def test_the_command_line_starts_without_pytorch() -> None:
    """It takes seconds to load, and `--help` and mistakes need not wait for it."""
    code = "import sys, atoll.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@cache
def all_mode_names() -> frozenset[str]:
    return frozenset(mode_names())


def name_comparisons(tree: ast.AST) -> list[int]:
    """Lines that compare something with a mode's name, or look it up among names, or match it."""
    names = all_mode_names()

    def is_name(node: ast.AST) -> bool:
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            return any(map(is_name, node.elts))
        if isinstance(node, ast.Dict):
            return any(key is not None and is_name(key) for key in node.keys)
        return isinstance(node, ast.Constant) and node.value in names

    found = []
    for node in ast.walk(tree):
        compared = isinstance(node, ast.Compare) and any(map(is_name, (node.left, *node.comparators)))
        matched = isinstance(node, ast.MatchValue) and is_name(node.value)
        looked_up = isinstance(node, ast.Subscript) and isinstance(node.value, ast.Dict) and is_name(node.value)
        if compared or matched or looked_up:
            found.append(node.lineno)
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nobody_compares_the_name_of_a_mode(path: Path) -> None:
    """Whoever needs to know something of a mode asks its rules; docs/decisions/0015-modes.md."""
    lines = name_comparisons(tree_of(path))
    assert not lines, f"{path.relative_to(ROOT.parent)}: lines {lines} compare a mode's name: ask its rules (atoll.plan.modes)"


@pytest.mark.parametrize(
    "source",
    [
        'if plan.mode == "swarm": pass',
        'kept = [one for one in runs if "alone" != one.mode]',
        'odd = mode not in ("lockstep", "parts")',
        'odd = mode in {"swarm"}',
        'match mode:\n    case "swarm" | "other":\n        pass',
        'price = {"swarm": 1, "other": 2}[mode]',
    ],
)
def test_the_test_of_names_sees_a_comparison(source: str) -> None:
    assert name_comparisons(ast.parse(source))


@pytest.mark.parametrize(
    "source", ['started(mode="alone")', 'extra["swarm"] = 1', "plan.mode == ALONE.name", 'x == "tables"', 'names = {"swarm": "a:b"}']
)
def test_naming_a_mode_is_not_comparing(source: str) -> None:
    assert not name_comparisons(ast.parse(source))
