"""The host memory, and the space on a disk, that the image of a rank takes: what the others go back to when it is lost
(`elastic/`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.plan.mesh import MODEL_AXES, Mesh
from shardwise.plan.replica_groups import Smaller, is_lone, num_groups
from shardwise.program.feedback import kept_losses
from shardwise.program.footprint import disk_bytes, updated_bytes_of
from shardwise.program.sign_exchange import keeps_residuals
from shardwise.program.spec import FlatSpec

ON_ACCELERATOR = "parameters are on an accelerator, whose memory is lost with its process"


@dataclass(frozen=True)
class ImageBytes:
    """Bytes of one rank. `live` would lie elsewhere without an image; `copy` is the image's cost."""

    live: int
    """What the optimizer updates in place there: states, and master weights of another dtype than the parameters; the
    parameters themselves too, if no other rank has them."""
    copy: int
    """The same after the last step, the parameters that only this rank has, and what islands have in common."""
    on_disk: int = 0
    """The second version of what is updated on a disk, where it costs as much as the first."""

    @property
    def total(self) -> int:
        return self.live + self.copy


def image_bytes(
    flats: Sequence[FlatSpec], states_per_param: int, coordinate: Mapping[str, int] | None = None
) -> ImageBytes:
    """For ranks that share memory, where sharded parameters rest. Scalars beside tensors and padding to 64 bytes are
    not counted. `coordinate` is the rank's; without one, the figures are those of the range with the most."""
    live = copy = 0
    for flat in flats:
        param, optim = flat.table.param, flat.table.optim
        if flat.lies_on_disk:
            continue
        if not flat.trainable:
            copy += flat.resting_bytes if param.shard or is_lone(flat.mesh) else 0
            continue
        updated = updated_bytes_of(flat, states_per_param, coordinate)
        params = flat.num_bytes(optim.shard, optim.dtype) if flat.master_is_param else 0
        live += updated + (params if flat.resident and flat.is_lone else 0)
        copy += updated + params + flat.outer_bytes
    below = [flat for flat in flats if flat.updates_from_disk]
    return ImageBytes(live, copy, rows_bytes(below, states_per_param, coordinate))


def rows_bytes(flats: Iterable[FlatSpec], states_per_param: int, coordinate: Mapping[str, int] | None = None) -> int:
    """What `flats` have on a disk, once."""
    return sum(disk_bytes(flat, coordinate, states_per_param) for flat in flats if flat.lies_on_disk)


def why_no_images(mesh: Mesh, smaller: Smaller, why_no_smaller: str) -> str:
    """Why a lost rank cannot be restored from images, in words; empty if it can, as far as the plan says. If `mesh` is
    one replica group, the others need one of the `smaller` meshes; `why_no_smaller` is known where there is none."""
    axes = [axis for axis in mesh.axes if axis in MODEL_AXES and mesh.size(axis) > 1]
    if axes and num_groups(mesh) == 1 and not smaller and not mesh.island_axes:
        named, because = ", ".join(axes), f": {why_no_smaller}" if why_no_smaller else ""
        return f"the mesh splits models or samples along {named}, and the remaining ranks cannot form it{because}"
    return ""


def what_begins_anew(flats: Sequence[FlatSpec]) -> str:
    """What all ranks let go of when some leave an elastic job or join it, in a sentence; empty if nothing is. It is a
    rank's own, so that what a lost one had is lost with it, and counts for one number of ranks alone."""
    kept = {
        "what codes of gradients have lost (wire.feedback)": any(map(kept_losses, flats)),
        "what was not sent of gradients that go as factors (powersgd)": any(flat.factored for flat in flats),
        "what was not sent of what the optimizer averages (one bit per element)": any(map(keeps_residuals, flats)),
    }
    found = " and ".join(what for what, is_kept in kept.items() if is_kept)
    return f"{found[0].upper()}{found[1:]} begins at zero when ranks leave or join." if found else ""
