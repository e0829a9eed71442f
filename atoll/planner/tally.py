"""Tally: what became of every plan the planner looked at. Each is counted once, so the numbers add up."""

from collections import Counter

__all__ = ["Tally"]


class Tally:
    """Plans priced in full, and plans (or drafts of them) ruled out before, by reason."""

    def __init__(self) -> None:
        self.priced = 0
        self.ruled_out: Counter[str] = Counter()

    @property
    def considered(self) -> int:
        """All of them."""
        return self.priced + self.ruled_out.total()

    def reasons(self) -> str:
        """The three for which most were ruled out, where nothing was found."""
        return ", ".join(f"{reason} ({count:,})" for reason, count in self.ruled_out.most_common(3) if count) or "no layout is possible"

    def lines(self, chosen: bool, why_not: str) -> tuple[str, ...]:
        """A line for each reason, most first; of those priced, all but the one chosen, if it was among them, were not taken: `why_not`."""
        rest = self.priced - chosen
        lines = [f"{count:,} × {reason}" for reason, count in self.ruled_out.most_common() if count]
        return (*lines, f"{rest:,} × {why_not}") if rest else tuple(lines)
