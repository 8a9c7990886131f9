"""What this machine has for ranks to run on."""

from __future__ import annotations

from shardwise.devices import TorchAccelerator


def count_gpus() -> int:
    """GPUs, or other accelerators, that torch sees here; asking does not create a context on any of them."""
    found = TorchAccelerator.found()
    return found.num_devices if found is not None else 0
