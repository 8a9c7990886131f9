"""Handling of the tensors that forwards save for backwards: kept, recomputed, or offloaded to the host or a disk.

A unit's forward is wrapped inside its hooks, as for compilation: gathers and frees stay outside, a recomputation finds
the unit gathered, and programs know nothing of it. Actions in the program cannot do this: only autograd knows which
tensors a forward saves, how often it runs before its backward, and when the last of them is used.
"""

from shardwise.runtime.activations.activation_offload import Offloading
from shardwise.runtime.activations.choice import Treatments, treatments_for
from shardwise.runtime.activations.install import TreatedSites
from shardwise.runtime.activations.on_disk import (
    BEHIND_BYTES,
    STAGING,
    DiskStore,
    PagedMemory,
    RehearsedDiskStore,
)
from shardwise.runtime.activations.stores import SAVED, ActivationMemory, HostStore, RehearsedStore, Store

__all__ = [
    "BEHIND_BYTES",
    "SAVED",
    "STAGING",
    "ActivationMemory",
    "DiskStore",
    "HostStore",
    "Offloading",
    "PagedMemory",
    "RehearsedDiskStore",
    "RehearsedStore",
    "Store",
    "TreatedSites",
    "Treatments",
    "treatments_for",
]
