"""The checks of `doctor` that do not concern torch. Each takes facts, and returns one `Check`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwise.cli.checks import GIB, Check
from shardwise.cli.host_facts import DiskRates, Leftovers
from shardwise.launch.hosts.facts import Interface
from shardwise.system.machine import TorchFacts
from shardwise.system.units import format_bytes

MANY_FILES, FEW_FILES = 4096, 256
SLOW_DISK = 50 * 2**20
LOOPBACK = "127."


def check_limits(soft: Mapping[str, int], *, has_rdma: bool) -> Check:
    """`soft` limits by name, -1 for none; `has_rdma` if InfiniBand or RoCE pins memory."""
    found = ", ".join(f"{name} {'unlimited' if limit == -1 else limit}" for name, limit in soft.items())
    files = soft.get("open files", -1)
    if 0 <= files < FEW_FILES:
        cure = "Each rank opens sockets to all others, and files. Raise the limit: ulimit -n 65536."
        return Check("limits", "fail", found, cure)
    if 0 <= files < MANY_FILES:
        return Check("limits", "warn", found, "Enough for tens of ranks only. Raise the limit: ulimit -n 65536.")
    if has_rdma and soft.get("locked memory", -1) != -1:
        return Check("limits", "warn", found, "NCCL over InfiniBand pins memory. Allow it: ulimit -l unlimited.")
    return Check("limits", "ok", found)


def check_network(found: Sequence[Interface], own: str, environ: Mapping[str, str]) -> Check:
    """`own` is the address of this host's name. It matters between hosts; on one, loopback is enough."""
    others = [one for one in found if not one.address.startswith(LOOPBACK)]
    names = ", ".join(
        f"{one.name} {one.address}{f' {one.megabits} Mbit/s' if one.megabits > 0 else ''}" for one in others
    )
    chosen = environ.get("GLOO_SOCKET_IFNAME")
    if chosen is not None and chosen not in {one.name for one in found}:
        cure = f"It is down, or has no address: use one of {', '.join(one.name for one in found)}, or unset it."
        return Check("network", "fail", f"GLOO_SOCKET_IFNAME={chosen}", cure)
    if not others:
        return Check("network", "ok", "only loopback", "That is enough for ranks on one host.")
    if chosen is not None:
        return Check("network", "ok", f"{names}; GLOO_SOCKET_IFNAME={chosen}")
    if not own:
        cure = "gloo needs it: add the name to /etc/hosts, or set GLOO_SOCKET_IFNAME."
        return Check("network", "warn", f"{names}; this host's name does not resolve", cure)
    if own.startswith(LOOPBACK):
        cure = "Other hosts cannot reach that. For several hosts, set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME."
        return Check("network", "ok", f"{names}; this host's name resolves to {own}", cure)
    return Check("network", "ok", names)


def check_driver(version: str, facts: TorchFacts) -> Check:
    """`version` of NVIDIA's driver, empty without one."""
    if not version:
        return Check("driver", "ok", "no NVIDIA driver")
    found = f"NVIDIA {version}"
    if not facts.gpus and "CUDA" not in facts.build:
        cure = "torch was built without CUDA, so it cannot use the GPUs: install a CUDA build from pytorch.org."
        return Check("driver", "warn", f"{found}, but torch is a {facts.build} build", cure)
    if not facts.gpus:
        cure = "Check nvidia-smi, CUDA_VISIBLE_DEVICES, and whether the container has the devices."
        return Check("driver", "warn", f"{found}, but torch sees no GPU", cure)
    return Check("driver", "ok", found)


def check_clock(is_synchronized: bool | None) -> Check:
    if is_synchronized is None:
        return Check("clock", "ok", "whether it is synchronized is unknown")
    if not is_synchronized:
        cure = "Logs of several hosts may be out of order: run chrony or systemd-timesyncd on this host."
        return Check("clock", "warn", "not synchronized", cure)
    return Check("clock", "ok", "synchronized")


def check_disk(folder: str, rates: DiskRates | str) -> Check:
    """`rates`, or the reason why the folder could not be written to."""
    name = f"disk {folder}"
    if isinstance(rates, str):
        return Check(name, "fail", rates, "Create or mount it, and make it writable for this user.")
    found = f"writes {format_bytes(rates.write)}/s, reads {format_bytes(rates.read)}/s"
    if min(rates.write, rates.read) < SLOW_DISK:
        cure = "Checkpoints and offload to it will be slow. `shardwise bench disk` measures it precisely."
        return Check(name, "warn", found, cure)
    return Check(name, "ok", found)


def check_versions(wrong: Sequence[str]) -> Check:
    if wrong:
        cure = "Run pip install -U shardwise, with the extras that you use, such as shardwise[transformers]."
        missing = any("not installed" in one for one in wrong)
        return Check("versions", "fail" if missing else "warn", "; ".join(wrong), cure)
    return Check("versions", "ok", "all requirements are met")


def check_leftovers(left: Leftovers) -> Check:
    if left.orphans:
        numbers = " ".join(map(str, left.orphans))
        return Check("leftovers", "warn", f"ranks without a launcher: {numbers}", f"They use memory: kill {numbers}")
    if left.shared:
        found = f"{len(left.shared)} files of dead processes in /dev/shm, {format_bytes(left.shared_bytes)}"
        cure = f"rm {' '.join(map(str, left.shared[:3]))} ..."
        return Check("leftovers", "warn" if left.shared_bytes > GIB else "ok", found, cure)
    if left.folders:
        folders = ", ".join(map(str, left.folders[:3]))
        return Check("leftovers", "ok", f"folders of dead launchers: {folders}", "The next launch removes them.")
    return Check("leftovers", "ok", "none")
