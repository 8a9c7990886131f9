"""Facts about the installed torch. Imported only by `doctor`, which survives its failure."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwise.system.devices import TorchAccelerator, bf16_ratio
from shardwise.system.machine import Gpu, TorchFacts


def torch_facts() -> TorchFacts:
    """The facts of torch; sees accelerators of the kind that it was built for. CUDA and ROCm share one name there."""
    gpus, trouble = _gpus()
    return TorchFacts(torch.__version__, _build(), _backends(), gpus, trouble, nccl_version(), bf16_ratio())


def nccl_version() -> str:
    """The version of NCCL (or RCCL) that torch uses; empty without one."""
    if not dist.is_available() or not dist.is_nccl_available():
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))


def _build() -> str:
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    hip = getattr(torch.version, "hip", None)
    if hip:
        return f"ROCm {hip}"
    found = TorchAccelerator.found()
    return found.kind.upper() if found is not None else "CPU"


def _backends() -> tuple[str, ...]:
    if not dist.is_available():
        return ()
    return tuple(name for name in ("gloo", "nccl", "xccl") if dist.is_backend_available(name))


def _gpus() -> tuple[tuple[Gpu, ...], str]:
    """The GPUs, or why they cannot be used: a driver that does not answer is a finding, not a crash."""
    try:
        found = TorchAccelerator.found()
        if found is None:
            return (), ""
        module = torch.get_device_module(found.kind)
        gpus = []
        for index in range(found.num_devices):
            free, total = module.mem_get_info(index)
            gpus.append(Gpu(module.get_device_name(index), total, free))
        return tuple(gpus), ""
    except RuntimeError as error:
        return (), str(error).splitlines()[0]
