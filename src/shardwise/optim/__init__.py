"""Any elementwise torch optimizer, over this rank's pieces of the parameters."""

from shardwise.optim.adopted import AdoptedOptimizer, Piece
from shardwise.optim.probe import vet

__all__ = ["AdoptedOptimizer", "Piece", "vet"]
