"""Graph: from a job to layers that know what they cost, and the annotations that constrain the planner."""

from atoll.graph.graph import Constraint, Graph, Layer, Node, Precision, SharedParameter, Work

__all__ = ["Constraint", "Graph", "Layer", "Node", "Precision", "SharedParameter", "Work"]
