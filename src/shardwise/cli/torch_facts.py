"""What the installed torch is and sees. Imported by `doctor` alone, which survives its failing."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwise.machine import Gpu, TorchFacts


def torch_facts() -> TorchFacts:
    """Ask torch; sees GPUs through CUDA or ROCm, which share one name there."""
    gpus, trouble = _gpus()
    return TorchFacts(torch.__version__, _build(), _backends(), gpus, trouble)


def _build() -> str:
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    hip = getattr(torch.version, "hip", None)
    return f"ROCm {hip}" if hip else "CPU"


def _backends() -> tuple[str, ...]:
    if not dist.is_available():
        return ()
    present = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    return tuple(name for name, there in present.items() if there)


def _gpus() -> tuple[tuple[Gpu, ...], str]:
    """The GPUs, or why they cannot be used: a driver that does not answer is a finding, not a crash."""
    if not torch.cuda.is_available():
        return (), ""
    try:
        gpus = []
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            gpus.append(Gpu(torch.cuda.get_device_name(index), total, free))
        return tuple(gpus), ""
    except RuntimeError as error:
        return (), str(error).splitlines()[0]
