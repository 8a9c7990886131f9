"""The kind of file system under a folder: some are on another machine, and some are not disks at all."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import TierError

TABLE = Path("/proc/self/mounts")
_REMOTE_FUSE = ("fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "fuse.goofys", "fuse.mount-s3", "fuse.davfs")
_REMOTE = frozenset(("nfs", "nfs4", "cifs", "smb2", "smb3", "smbfs", "9p", "afs", "ncpfs", "coda", *_REMOTE_FUSE))
"""On other machines, over a network that is slower than any disk; they keep names for deleted files that are open."""
_PARALLEL = frozenset(
    ("lustre", "gpfs", "beegfs", "ceph", "fuse.ceph", "glusterfs", "fuse.glusterfs", "wekafs", "pvfs2", "panfs")
)
"""On other machines, but made for many readers and writers: as fast as their setup."""
_MEMORY = frozenset(("tmpfs", "ramfs", "devtmpfs"))
_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Mount:
    source: str
    point: Path
    kind: str


def mount_of(folder: Path, table: str | None = None) -> Mount | None:
    """The mount that contains `folder`, from the lines of `/proc/self/mounts`; `None` if that cannot be told."""
    if table is None:
        try:
            table = TABLE.read_text(errors="replace")
        except OSError:
            return None
    place = folder.resolve()
    found: Mount | None = None
    for line in table.splitlines():
        words = line.split()
        if len(words) < 3:
            continue
        source, point, kind = (_ESCAPED.sub(lambda code: chr(int(code[1], 8)), word) for word in words[:3])
        mount = Mount(source, Path(point), kind)
        deeper = found is None or len(mount.point.parts) >= len(found.point.parts)  # a later mount hides an earlier one
        if place.is_relative_to(mount.point) and deeper:
            found = mount
    return found


def is_memory(folder: Path) -> bool:
    """Whether `folder` is memory, as far as that can be told."""
    mount = mount_of(folder)
    return mount is not None and mount.kind in _MEMORY


def check_local(folder: Path, table: str | None = None) -> str | None:
    """A warning about the file system under `folder`, if there is one. Raises `TierError` for a network file system."""
    mount = mount_of(folder, table)
    if mount is None:
        return None
    where = f"{folder} is on {mount.kind} ({mount.source}, mounted at {mount.point})"
    if mount.kind in _REMOTE:
        raise TierError(f"{where}, which is over a network. Name a folder on a disk of this machine; df -T lists them.")
    if mount.kind in _PARALLEL:
        return f"{where}, a file system of other machines: measure it with shardwise bench disk before relying on it."
    if mount.kind in _MEMORY:
        return f"{where}, which is memory: what lies there takes as much of it as before."
    if mount.kind.startswith("fuse"):
        return f"{where}, which a program serves: measure it with shardwise bench disk before relying on it."
    return None
