"""A process may run several workers, one for each of several stages: how they are named, and whose they are.

To the protocol each is a worker like any other, with its own incarnation, state and buffers. Only what rests on "dies alone" asks for the
process: how many replicas a stage has, where newcomers help, and who may speak in whose name.
"""

from collections.abc import Iterable

__all__ = ["hosted_number", "hosted_workers", "process_of", "processes"]

_SEPARATOR = "+"
"""Between a process's name and a worker's number. No member is called so: names in certificates are letters, digits, `.`, `_` and `-`."""


def hosted_workers(process: str, count: int) -> tuple[str, ...]:
    """The workers of a process: the first has its name, the others its name and a number."""
    return (process, *(f"{process}{_SEPARATOR}{number}" for number in range(1, count)))


def process_of(worker: str) -> str:
    """The process that a worker, or any other member, runs in."""
    return worker.partition(_SEPARATOR)[0]


def hosted_number(worker: str) -> int | None:
    """Which worker of its process it is, from 0; None for what `hosted_workers` names nobody."""
    process, separator, number = worker.partition(_SEPARATOR)
    if not separator:
        return 0
    is_number = number.isascii() and number.isdigit() and not number.startswith("0")
    return int(number) if process and is_number and len(number) <= 6 else None


def processes(workers: Iterable[str]) -> set[str]:
    """The processes of some workers: those of one process die together."""
    return {process_of(worker) for worker in workers}
