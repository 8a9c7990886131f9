"""What becomes of the tensors that forwards save for backwards: kept, recomputed, or kept on the host or a disk."""

from shardwise.activations.choice import Treatment, Treatments, treatments_for
from shardwise.activations.install import TreatedSites
from shardwise.activations.offload import Offloading
from shardwise.activations.stores import ActivationMemory, HostStore, RehearsedStore

__all__ = [
    "ActivationMemory",
    "HostStore",
    "Offloading",
    "RehearsedStore",
    "TreatedSites",
    "Treatment",
    "Treatments",
    "treatments_for",
]
