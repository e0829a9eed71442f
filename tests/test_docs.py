"""Documentation that must keep up with the code."""

import inspect
import re
from collections import Counter
from pathlib import Path

import atoll
from atoll.cost import Evaluator

DOCS = Path(atoll.__file__).parent.parent / "docs"


def test_every_word_of_the_step_breakdown_is_explained() -> None:
    words = re.findall(r'^ +"(\w+)": ', inspect.getsource(Evaluator._breakdown), re.MULTILINE)
    assert {"compute", "bubble"} <= set(words)
    step = (DOCS / "reading-a-plan.md").read_text(encoding="utf-8").split("## The step")[1]
    assert [word for word in words if f"\n| {word} | " not in step] == []


def test_make_bench_runs_what_the_readme_of_the_benchmarks_lists() -> None:
    root = DOCS.parent
    names = re.search(r"^BENCHMARKS := (.*?[^\\])$", (root / "Makefile").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert names is not None
    listed = re.findall(r"^\| `(\w+)\.py(.*?)` \|(.*)", (root / "benchmarks" / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    elsewhere = {"swarm_faults", "latency_lab", "swarm_joining_lab", "islands", "zoo"}  # these take long, or a machine of their own
    needs_nothing = {name for name, arguments, _ in listed if not arguments} - elsewhere
    assert set(names[1].replace("\\", "").split()) == needs_nothing
    assert all((root / "benchmarks" / f"{name}.py").exists() for name, *_ in listed)


def test_no_document_says_the_same_paragraph_twice() -> None:
    """A text that was pasted twice, or a long line of a table."""
    for path in [*sorted(DOCS.rglob("*.md")), *sorted(DOCS.parent.glob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        long = [part for part in [*text.split("\n\n"), *text.splitlines()] if len(part) > 100]
        assert [part for part, times in Counter(long).items() if times > 1 and text.count(part) > 1] == [], path


def test_prose_is_wrapped() -> None:
    """Tables, code and links that cannot be broken may be longer."""
    for path in [*sorted(DOCS.rglob("*.md")), *sorted(DOCS.parent.glob("*.md"))]:
        if path.name == "events.md":
            continue  # written from the docstrings of the events (tests/test_events.py)
        prose = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        long = [line for line in prose.splitlines() if len(line) > 100 and not line.startswith(("|", "#", "    "))]
        assert [line for line in long if len(re.findall(r"(?:`[^`]*`|\[[^]]*\]\([^)]*\)|\S)+", line.lstrip())) > 1] == [], path
