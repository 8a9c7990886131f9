"""What PyTorch code sees when it accesses a sharded parameter, or its gradient, between two computations."""

from shardwise.tensors.owner import Owner
from shardwise.tensors.structure import Structure
from shardwise.tensors.uncut import use_uncut_states

__all__ = ["Owner", "Structure", "use_uncut_states"]
