"""Named mesh axes, coordinates and groups of ranks."""

from shardwise.mesh.mesh import EXPERT_AXIS, MODEL_AXES, SEQUENCE_AXIS, Mesh

__all__ = ["EXPERT_AXIS", "MODEL_AXES", "SEQUENCE_AXIS", "Mesh"]
