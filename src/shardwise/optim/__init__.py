"""Optimizers over this rank's pieces of the parameters: any elementwise one of torch, and some of our own, which are
imported when they are first used, because most jobs bring torch's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.optim.adopted import SCALAR_STATES, WHOLE_STATES, AdoptedOptimizer
from shardwise.optim.cooperative import Cooperative, Peers
from shardwise.optim.disk_check import require_states_for_disk
from shardwise.optim.hyper import hyper_digest, hyperparameters
from shardwise.optim.piece import Piece
from shardwise.optim.probe import StateForm, state_keys, vet
from shardwise.optim.rank_peers import RankPeers
from shardwise.optim.step_method import replaced_step
from shardwise.system.first_use import imported_when_used

if TYPE_CHECKING:
    from shardwise.optim.adafactor import Adafactor
    from shardwise.optim.adam import AdamW
    from shardwise.optim.lamb import Lamb
    from shardwise.optim.lion import Lion
    from shardwise.optim.muon import Muon, hidden_matrices
    from shardwise.optim.onebit import OneBitAdam, OneBitLamb, ZeroOneAdam

__all__ = [
    "SCALAR_STATES",
    "WHOLE_STATES",
    "Adafactor",
    "AdamW",
    "AdoptedOptimizer",
    "Cooperative",
    "Lamb",
    "Lion",
    "Muon",
    "OneBitAdam",
    "OneBitLamb",
    "Peers",
    "Piece",
    "RankPeers",
    "StateForm",
    "ZeroOneAdam",
    "hidden_matrices",
    "hyper_digest",
    "hyperparameters",
    "replaced_step",
    "require_states_for_disk",
    "state_keys",
    "vet",
]

_HOMES = {
    "Adafactor": ".adafactor",
    "AdamW": ".adam",
    "Lamb": ".lamb",
    "Lion": ".lion",
    "Muon": ".muon",
    "OneBitAdam": ".onebit",
    "OneBitLamb": ".onebit",
    "ZeroOneAdam": ".onebit",
    "hidden_matrices": ".muon",
}

__getattr__ = imported_when_used(__name__, _HOMES)
