"""What PyTorch code sees when it accesses a sharded parameter, or its gradient, between two computations."""

from shardwise.sharded.at_rest.owner import Owner
from shardwise.sharded.at_rest.structure import Structure
from shardwise.sharded.at_rest.unsplit import use_unsplit_states

__all__ = ["Owner", "Structure", "use_unsplit_states"]
