"""What PyTorch code sees when it accesses a sharded parameter, or its gradient, between two computations."""

from shardwise.tensors.owner import Owner
from shardwise.tensors.structure import Structure
from shardwise.tensors.unsplit import use_unsplit_states

__all__ = ["Owner", "Structure", "use_unsplit_states"]
