"""Why ranks cannot communicate by NCCL, from what each tells about itself. Pure: ranks and `doctor` agree on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

VARIABLE = "NCCL_SOCKET_IFNAME"


def matching_interfaces(chosen: str, names: Sequence[str]) -> list[str]:
    """The interfaces of `names` that NCCL would use, for a value of NCCL_SOCKET_IFNAME.

    It is a list of beginnings of names; after `=` they are whole names, after `^` those to leave out
    (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname).
    """
    leaves_out = chosen.startswith("^")
    is_exact = chosen.removeprefix("^").startswith("=")
    given = [entry for entry in chosen.removeprefix("^").removeprefix("=").split(",") if entry]
    named = [name for name in names if any(name == one if is_exact else name.startswith(one) for one in given)]
    return [name for name in names if name not in named] if leaves_out else named


def obstacle(ends: Sequence[str], facts: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
    """What is wrong and its cure, if the ranks at `ends` cannot communicate by NCCL; else None.

    A rank's facts are the version of NCCL (`nccl`), the number of GPUs (`gpus`), the names of its `interfaces`, and the
    value of NCCL_SOCKET_IFNAME (`chosen`, empty if it is not set).
    """
    versions = {end: str(one["nccl"]) for end, one in zip(ends, facts, strict=True)}
    if "" in versions.values():
        lacking = ", ".join(end for end, version in versions.items() if not version)
        return f"torch has no NCCL on {lacking}", "Install a torch built with CUDA there, the same on all hosts."
    blind = [end for end, one in zip(ends, facts, strict=True) if not one["gpus"]]
    if blind:
        cure = "Run `shardwise doctor` there. CUDA_VISIBLE_DEVICES may hide it, or the driver may be too old for torch."
        return f"torch sees no GPU on {', '.join(blind)}", cure
    if len(set(versions.values())) > 1:
        told = ", ".join(f"{version} on {end}" for end, version in versions.items())
        return f"different versions of NCCL: {told}", "Install the same torch, and the same nvidia-nccl, everywhere."
    for end, one in zip(ends, facts, strict=True):
        if one["chosen"] and not matching_interfaces(one["chosen"], one["interfaces"]):
            known = ", ".join(one["interfaces"])
            return f"{VARIABLE}={one['chosen']} names no interface of {end}", f"Give one of {known}, or unset it."
    return None
