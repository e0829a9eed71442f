"""Plans in files: JSON or the text form, told apart by the first character."""

import os
import tempfile
from pathlib import Path

from atoll.errors import PlanError
from atoll.plan.plan import Plan
from atoll.plan.text import parse_plan, to_text

__all__ = ["load_plan", "save_plan"]


def load_plan(path: "str | Path") -> Plan:
    """Read a plan from a JSON or text file; errors name the file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{path}: cannot read the plan: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise PlanError(f"{path}: cannot read the plan: the file is not UTF-8 text") from None
    if text.lstrip().startswith("{"):
        return Plan.from_json(text, str(path))
    return parse_plan(text, str(path))


def save_plan(plan: Plan, path: "str | Path") -> None:
    """Write a plan, as text when the name ends in `.txt` or `.plan` and as JSON otherwise. The file is whole or untouched."""
    target = Path(path)
    content = to_text(plan) if target.suffix in (".txt", ".plan") else plan.to_json() + "\n"
    try:
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(content)
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise PlanError(f"{path}: cannot write the plan: {(error.strerror or str(error)).lower()}") from None


def _umask() -> int:
    """The process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
