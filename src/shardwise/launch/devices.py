"""The accelerators of this machine."""

from __future__ import annotations

from shardwise.system.devices import TorchAccelerator


def count_gpus() -> int:
    """The number of GPUs or other accelerators that torch sees; creates no context on any of them."""
    found = TorchAccelerator.found()
    return found.num_devices if found is not None else 0


def device_kind() -> str | None:
    """Torch's name for the kind of accelerator that it sees here, such as `cuda`; None if it sees none."""
    found = TorchAccelerator.found()
    return found.kind if found is not None and found.num_devices else None
