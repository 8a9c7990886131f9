"""Named axes, coordinates, groups of ranks."""

from shardwise.mesh.mesh import Mesh

__all__ = ["Mesh"]
