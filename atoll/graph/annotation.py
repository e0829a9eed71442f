"""Annotation: a noun without torch, so that planning from a preset or a saved graph does not wait for torch to load."""

from typing import Literal

import msgspec

__all__ = ["Annotation", "Kind"]

Kind = Literal["replica", "split", "stage", "pipeline"]


class Annotation(msgspec.Struct, frozen=True, kw_only=True):
    """One demand, and the modules of a model it covers (`modules` is filled by `annotations_of`)."""

    kind: Kind
    devices: int = 0  # 0: free
    micro_batches: int = 0  # pipeline only; 0: free
    uneven: bool = True  # split only
    is_default: bool = False  # covers what no replica or split covers
    where: str = ""  # "train.py:12"
    id: str = ""
    parent: str = ""  # id of the block it was made in
    made: int = 0  # later annotations have larger numbers
    modules: frozenset[str] = frozenset()  # paths; a module that is reached by several paths is here with all of them
    shared: frozenset[str] = frozenset()  # of those, reached by several paths
