"""Transport: the swarm's messages over the fabric. Names are found in a directory that the coordinator keeps."""

from typing import Any

from atoll.control import messages

__all__ = ["ANY_MESSAGE"]


def _union() -> Any:
    kinds = [getattr(messages, name) for name in messages.__all__]
    found: Any = None
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, messages.Message) and kind is not messages.Message:
            found = kind if found is None else found | kind
    return found


ANY_MESSAGE: Any = _union()
"""Every kind of message that may arrive."""
