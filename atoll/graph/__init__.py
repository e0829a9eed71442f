"""Graph: from a job to layers that know what they cost, and the annotations that constrain the planner.

What needs torch (the annotations' functions) is loaded when it is first asked for: planning a preset need not wait for it.
"""

import importlib
from typing import TYPE_CHECKING

from atoll.graph.constraints import Annotation, check_constraints, resolve
from atoll.graph.generate import (
    dense_transformer,
    encoder_decoder,
    mixture_of_experts,
    recurrent_translator,
    speech_recogniser,
    transformer_encoder,
)
from atoll.graph.generate_vision import residual_network, vision_transformer
from atoll.graph.graph import Constraint, Graph, Layer, Node, Precision, SharedParameter, Work
from atoll.graph.presets import PRESETS, Preset, preset

if TYPE_CHECKING:
    from atoll.graph.annotations import annotations_of, default, pipeline, replica, split, stage
    from atoll.graph.capture import Captured, capture_program

__all__ = [
    "PRESETS",
    "Annotation",
    "Captured",
    "Constraint",
    "Graph",
    "Layer",
    "Node",
    "Precision",
    "Preset",
    "SharedParameter",
    "Work",
    "annotations_of",
    "capture_program",
    "check_constraints",
    "default",
    "dense_transformer",
    "encoder_decoder",
    "mixture_of_experts",
    "pipeline",
    "preset",
    "recurrent_translator",
    "replica",
    "residual_network",
    "resolve",
    "speech_recogniser",
    "split",
    "stage",
    "transformer_encoder",
    "vision_transformer",
]

# `capture` itself is imported from the module of that name
_NEEDS_TORCH = dict.fromkeys(("annotations_of", "default", "pipeline", "replica", "split", "stage"), "atoll.graph.annotations")
_NEEDS_TORCH |= dict.fromkeys(("Captured", "capture_program"), "atoll.graph.capture")


def __getattr__(name: str) -> object:
    if name in _NEEDS_TORCH:
        return getattr(importlib.import_module(_NEEDS_TORCH[name]), name)
    raise AttributeError(f"module 'atoll.graph' has no attribute {name!r}")
