"""Named axes, coordinates, groups of ranks."""

from shardwise.mesh.mesh import MODEL_AXES, SEQUENCE_AXIS, Mesh

__all__ = ["MODEL_AXES", "SEQUENCE_AXIS", "Mesh"]
