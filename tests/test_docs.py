"""Documentation that must keep up with the code."""

import inspect
import re
from pathlib import Path

import atoll
from atoll.cost import Evaluator

DOCS = Path(atoll.__file__).parent.parent / "docs"


def test_every_word_of_the_step_breakdown_is_explained() -> None:
    words = re.findall(r'^ +"(\w+)": ', inspect.getsource(Evaluator._breakdown), re.MULTILINE)
    assert {"compute", "bubble"} <= set(words)
    step = (DOCS / "reading-a-plan.md").read_text(encoding="utf-8").split("## The step")[1]
    assert [word for word in words if f"\n| {word} | " not in step] == []
