"""The shape of the project: imports point one way along the road, modules say what they are for, public names change on purpose."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import atoll

ROOT = Path(atoll.__file__).parent
ROAD = (
    "errors", "blame", "uncaught", "units", "randomness", "events", "data", "job", "script", "graph", "cluster", "codec", "plan", "cost",
    "planner", "fabric", "control", "runtime", "simulate", "lab", "watch", "cli",
)  # fmt: skip
"""A file or folder imports only from those before it: docs/layout.md."""

LATER_ON_PURPOSE = {("job", "runtime"), ("job", "watch")}
"""`Job.run()` is where the user starts, so it loads what runs and shows the job; inside the function, when it is called."""

MODULES = sorted(path for path in ROOT.rglob("*.py"))


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
    for line, module in imports(ast.parse(path.read_text(encoding="utf-8"))):
        there = module.split(".")[1] if "." in module else "__init__"
        if here == "__init__" or there == here or (here, there) in LATER_ON_PURPOSE:
            continue
        if there not in ROAD or ROAD.index(there) > ROAD.index(here):
            wrong.append(f"{path.relative_to(ROOT.parent)}:{line}: {here} must not import {module}")
    return wrong


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_says_what_it_is_for_and_imports_along_the_road(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{path}: a module opens by saying what it is for"
    assert place(path) == "__init__" or place(path) in ROAD, f"{path}: not on the road of docs/layout.md"
    assert not wrong_way(path), "\n".join(wrong_way(path))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_functions_stay_small_and_public_names_are_documented(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 80, f"{path}:{node.lineno}: {node.name} is {length} lines long"
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            overload = any(isinstance(decorator, ast.Name) and decorator.id == "overload" for decorator in node.decorator_list)
            assert overload or ast.get_docstring(node), f"{path}:{node.lineno}: {node.name} has no docstring"


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
        *["AtollError", "Cluster", "Graph", "Job", "Plan", "RunResult", "StopTraining", "capture", "default", "load_cluster", "load_job"],
        *["pipeline", "replica", "split", "stage"],
    ]


def test_the_command_line_starts_without_pytorch() -> None:
    """It takes seconds to load, and `--help` and mistakes need not wait for it."""
    code = "import sys, atoll.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
