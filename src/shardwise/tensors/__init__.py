"""What PyTorch code gets where it touches a sharded parameter, or its gradient, between two computations."""

from shardwise.tensors.owner import Owner
from shardwise.tensors.structure import Structure
from shardwise.tensors.uncut import hang_uncut_states

__all__ = ["Owner", "Structure", "hang_uncut_states"]
