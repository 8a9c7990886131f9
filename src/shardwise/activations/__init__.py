"""Handling of the tensors that forwards save for backwards: kept, recomputed, or offloaded to the host or a disk."""

from shardwise.activations.choice import Treatment, Treatments, treatments_for
from shardwise.activations.install import TreatedSites
from shardwise.activations.offload import Offloading
from shardwise.activations.on_disk import DiskStore, PagedMemory
from shardwise.activations.stores import ActivationMemory, HostStore, RehearsedStore, Store

__all__ = [
    "ActivationMemory",
    "DiskStore",
    "HostStore",
    "Offloading",
    "PagedMemory",
    "RehearsedStore",
    "Store",
    "TreatedSites",
    "Treatment",
    "Treatments",
    "treatments_for",
]
