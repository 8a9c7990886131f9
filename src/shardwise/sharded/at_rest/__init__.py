"""What PyTorch code sees when it accesses a sharded parameter, or its gradient, between two computations."""

from shardwise.sharded.at_rest.own_share import OwnShare
from shardwise.sharded.at_rest.owner import Owner
from shardwise.sharded.at_rest.stage_names import StageNames
from shardwise.sharded.at_rest.structure import Structure
from shardwise.sharded.at_rest.torch_checkpoints import give_values_to_torch
from shardwise.sharded.at_rest.unsplit import use_unsplit_states

__all__ = ["OwnShare", "Owner", "StageNames", "Structure", "give_values_to_torch", "use_unsplit_states"]
