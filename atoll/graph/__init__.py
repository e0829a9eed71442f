"""Graph: from a job to layers that know what they cost, and the annotations that constrain the planner."""

from atoll.graph.generate import dense_transformer, encoder_decoder, mixture_of_experts, transformer_encoder
from atoll.graph.graph import Constraint, Graph, Layer, Node, Precision, SharedParameter, Work
from atoll.graph.presets import PRESETS, Preset, preset

__all__ = [
    "Constraint",
    "Graph",
    "Layer",
    "Node",
    "PRESETS",
    "Precision",
    "Preset",
    "SharedParameter",
    "Work",
    "dense_transformer",
    "encoder_decoder",
    "mixture_of_experts",
    "preset",
    "transformer_encoder",
]
