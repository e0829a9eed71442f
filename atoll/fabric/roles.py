"""Who may call what: methods state the roles that may call them, and what is not stated is refused.

```python
class Store:
    @allowed("worker", "coordinator")
    async def fetch(self, request: Fetch, peer: Peer) -> Reply: ...
```
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from atoll.errors import RefusedError
from atoll.fabric.method import methods_of

__all__ = ["allowed", "authorisation", "roles_table"]

Function = TypeVar("Function", bound=Callable[..., Any])
_ATTRIBUTE = "roles_allowed"


def allowed(*roles: str) -> Callable[[Function], Function]:
    """States which roles may call a method."""

    def state(function: Function) -> Function:
        setattr(function, _ATTRIBUTE, frozenset(roles))
        return function

    return state


def roles_table(services: Iterable[object]) -> dict[str, frozenset[str]]:
    """The roles of every method of some services, by the name it travels under; none where it states none."""
    return {name: getattr(function, _ATTRIBUTE, frozenset()) for service in services for name, (_, function) in methods_of(service).items()}


def authorisation(table: Mapping[str, frozenset[str]]) -> Callable[[str, str], None]:
    """What a fabric asks before it serves a call: raises RefusedError unless the table has the role for the method."""

    def authorise(role: str, method: str) -> None:
        roles = table.get(method, frozenset())
        if role not in roles:
            who = f"only {' and '.join(f'{name}s' for name in sorted(roles))} may" if roles else "it states no roles, so nobody may"
            raise RefusedError(f"{role}s may not call {method}: {who}")

    return authorise
