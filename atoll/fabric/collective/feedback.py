"""Error feedback of reductions: what a member's encodings left out of one sum goes into the next, so that sums of sums become exact.

A member encodes every value once a round at most: as its contribution, as its site's sum where it stands in, or as the result where it is
the owner. What that leaves out is owed by the member, whatever it was and whoever owns the value next time: all of it belongs to the same
sum. So one row of values is enough, and at any time: the results so far + what members owe = the sums so far (of weighted contributions;
results of means count times their divisors).
"""

from collections.abc import Callable

import torch

from atoll.codec.tensors import decode
from atoll.errors import FabricError
from atoll.fabric.collective.messages import Chunk
from atoll.fabric.collective.outcome import PartOutcome, Reduction
from atoll.fabric.collective.plan import RoundPlan

__all__ = ["SumFeedback"]


class SumFeedback:
    """What one member owes to one row of values that is reduced again and again. Give it to every `reduce` of that row.

    Only for members that receive the result. A round changes nothing by itself: `keep` the reduction once its result is used. A round that
    failed, or is repeated, is not kept, and the next one starts from the same debt. Takes twice the memory of the row in fp32.
    """

    def __init__(self, elements: int) -> None:
        self.owed = torch.zeros(elements)
        self._left = torch.zeros(elements)  # by the round under way, or the last one
        self._plan: RoundPlan | None = None  # of that round
        self._encoded: set[tuple[int, int]] = set()  # runs of elements it has written
        self._name = ""
        self._busy = False

    def begin(self, plan: RoundPlan, name: str) -> None:
        """A round begins; one that was not kept is forgotten."""
        if self._busy:
            raise FabricError(f"round {plan.id}: its error feedback is in use by another round; use one for each row of values")
        if not plan.member(name).receives:
            raise FabricError(f"round {plan.id}: {name} does not receive the result, so it cannot know what of it is owed")
        if plan.elements != self.owed.numel():
            raise FabricError(f"round {plan.id}: error feedback of {self.owed.numel()} values was given a round of {plan.elements}")
        self._plan, self._name, self._busy = plan, name, True
        self._encoded.clear()

    def end(self) -> None:
        """The round is over, one way or the other: nothing more is encoded in it."""
        self._busy = False

    def encode(self, span: tuple[int, int], value: torch.Tensor, divisor: float, encode: Callable[[torch.Tensor], Chunk]) -> Chunk:
        """A sum, with what is owed to it and divided, as `encode` has it travel; what that leaves out is left here. NaN is never owed."""
        start, stop = span
        total = self.owed[start:stop] + value
        chunk = encode(total if divisor == 1.0 else total / divisor)
        left = torch.sub(total, decode(chunk.encoded()).mul_(divisor), out=self._left[start:stop])
        left.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        self._encoded.add(span)
        return chunk

    def keep(self, reduction: Reduction) -> None:
        """The result is used: from now on what its encodings left out is owed, where this member's were in it. Once for a round."""
        if self._plan is None or reduction.round != self._plan.id or self._busy:
            raise FabricError(f"round {reduction.round} is not the one this error feedback was last used in, or is not over")
        for part in reduction.parts:
            if self._counts(self._plan, part):
                self._keep(part)
        self._plan = None

    def reset(self) -> None:
        """Nothing is owed: everybody got the whole state some other way."""
        self.owed.zero_()
        self._plan = None

    def _counts(self, plan: RoundPlan, part: PartOutcome) -> bool:
        """Whether something this member encoded is in a part."""
        me = plan.member(self._name)
        if not part.contributors or part.owner == self._name:
            return bool(part.contributors)
        if me.weight is not None:
            return self._name in part.contributors
        return any(plan.member(name).site == me.site for name in part.contributors)  # it stood in for them, or encoded nothing

    def _keep(self, part: PartOutcome) -> None:
        if (part.start, part.stop) in self._encoded:
            self.owed[part.start : part.stop] = self._left[part.start : part.stop]
