"""Graph: from a job to layers that know what they cost, and the annotations that constrain the planner.

Nothing here loads torch: what does (`atoll.graph.annotations`, capture) is imported by its own name.
"""

from atoll.graph.annotation import Annotation
from atoll.graph.constraints import resolve
from atoll.graph.contradictions import check_constraints
from atoll.graph.generate import dense_transformer, encoder_decoder, mixture_of_experts, speech_recogniser, transformer_encoder
from atoll.graph.generate_recurrent import recurrent_translator
from atoll.graph.generate_vision import residual_network, vision_transformer
from atoll.graph.graph import Constraint, Graph, Layer, Node, Precision, SharedParameter, Work
from atoll.graph.presets import PRESETS, Preset, preset

__all__ = [
    "Annotation",
    "Constraint",
    "Graph",
    "Layer",
    "Node",
    "PRESETS",
    "Precision",
    "Preset",
    "SharedParameter",
    "Work",
    "check_constraints",
    "dense_transformer",
    "encoder_decoder",
    "mixture_of_experts",
    "preset",
    "recurrent_translator",
    "residual_network",
    "resolve",
    "speech_recogniser",
    "transformer_encoder",
    "vision_transformer",
]
