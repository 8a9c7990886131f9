"""What PyTorch code gets where it touches a sharded parameter, or its gradient, between two computations."""

from shardwise.tensors.owner import Owner
from shardwise.tensors.structure import Structure

__all__ = ["Owner", "Structure"]
