"""Credit: how many bytes of messages may be on their way or unread, so that a slow reader bounds memory on both sides."""

from atoll.errors import FrameError

__all__ = ["MESSAGE_COST_BYTES", "Window", "cost_of"]

MESSAGE_COST_BYTES = 512
"""What even an empty message costs, and each tensor in it: the objects that keep them."""


def cost_of(size_bytes: int, tensors: int) -> int:
    """What a message takes from a window."""
    return max(size_bytes, MESSAGE_COST_BYTES * (1 + tensors))


class Window:
    """A bound on bytes that were sent and not yet taken by their reader. A message larger than the whole window travels alone."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    def admits(self, cost: int) -> bool:
        """Whether a message may go now."""
        return not cost or self.used_bytes == 0 or self.used_bytes + cost <= self.limit_bytes

    def take(self, cost: int) -> None:
        """A message goes."""
        self.used_bytes += cost

    def give(self, cost: int) -> None:
        """A message was taken; FrameError if more comes back than went."""
        if cost > self.used_bytes:
            raise FrameError(f"credit for {cost} bytes where {self.used_bytes} were unread")
        self.used_bytes -= cost

    def receive(self, cost: int) -> None:
        """A message arrived; FrameError if its sender had no credit for it."""
        if not self.admits(cost):
            raise FrameError(f"a message of {cost} bytes while {self.used_bytes} of {self.limit_bytes} were unread: sent without credit")
        self.take(cost)
