"""What every benchmark prints: aligned tables, or one JSON object with the machine's description."""

import json
import os
import platform
from collections.abc import Mapping, Sequence

__all__ = ["machine", "print_json", "print_table"]


def machine() -> dict[str, object]:
    """Where a benchmark ran."""
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def print_json(result: Mapping[str, object]) -> None:
    """The result with the machine that made it."""
    print(json.dumps({**result, "machine": machine()}, indent=1))


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A title and aligned columns: numbers to the right, text to the left."""
    texts = [[_text(value) for value in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(header), *texts]) for i in range(len(header))]
    right = [all(isinstance(row[i], int | float) for row in rows) for i in range(len(header))]
    print(f"\n{title}")
    for line in [list(header), *texts]:
        cells = (cell.rjust(width) if side else cell.ljust(width) for cell, width, side in zip(line, widths, right, strict=True))
        print("  " + "  ".join(cells).rstrip())


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
