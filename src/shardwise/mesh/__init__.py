"""Named axes, coordinates, groups of ranks."""

from shardwise.mesh.mesh import MODEL_AXES, Mesh

__all__ = ["MODEL_AXES", "Mesh"]
