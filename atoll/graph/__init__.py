"""Graph: from a job to layers that know what they cost, and the annotations that constrain the planner.

What needs torch (the annotations' functions) or the file of presets is loaded when it is first asked for.
"""

import importlib
from typing import TYPE_CHECKING

from atoll.graph.constraints import Annotation, check_constraints, resolve
from atoll.graph.generate import (
    dense_transformer,
    encoder_decoder,
    mixture_of_experts,
    recurrent_translator,
    residual_network,
    speech_recogniser,
    transformer_encoder,
    vision_transformer,
)
from atoll.graph.graph import Constraint, Graph, Layer, Node, Precision, SharedParameter, Work

if TYPE_CHECKING:
    from atoll.graph.annotations import annotations_of, default, pipeline, replica, split, stage
    from atoll.graph.capture import Captured, capture_program
    from atoll.graph.presets import PRESETS, Preset, preset

__all__ = ["Annotation", "Constraint", "Graph", "Layer", "Node", "Precision", "SharedParameter", "Work"]
__all__ += ["check_constraints", "resolve"]
__all__ += ["annotations_of", "default", "pipeline", "replica", "split", "stage"]
__all__ += ["Captured", "capture_program"]
__all__ += ["dense_transformer", "encoder_decoder", "mixture_of_experts", "recurrent_translator"]
__all__ += ["residual_network", "speech_recogniser", "transformer_encoder", "vision_transformer"]
__all__ += ["PRESETS", "Preset", "preset"]

_LATER = {  # `capture` itself is imported from the module of that name
    "annotations": ("annotations_of", "default", "pipeline", "replica", "split", "stage"),
    "capture": ("Captured", "capture_program"),
    "presets": ("PRESETS", "Preset", "preset"),
}


def __getattr__(name: str) -> object:
    for module, names in _LATER.items():
        if name in names:
            return getattr(importlib.import_module(f"atoll.graph.{module}"), name)
    raise AttributeError(f"module 'atoll.graph' has no attribute {name!r}")
