"""The least offload with which a model fits a plan's memory budget, found before anything is changed.

First the states and updates of as few units as necessary go to the host; if that is not enough, parameters at rest too:
frozen ones alone, with all updates on the device, if that is enough. If the host has no room for all of it, the states
of as few units as necessary go to a disk; if that is not enough, parameters at rest too, if a rank has the same range
of both.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import nn

from shardwise.errors import ConfigError
from shardwise.fit.tier_time import TierTime, tier_time
from shardwise.memory import UnitChoice, choose_units, unit_numel, unit_specs
from shardwise.parallel.experts import ExpertSplit, expert_split
from shardwise.parallel.model_axes import boxes_for, rows_for, split_of
from shardwise.plan import Offload, Plan
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import check_budget, table_for
from shardwise.program import (
    NUM_DISK_BUFFERS,
    Activations,
    Footprint,
    StepProgram,
    Trace,
    UnitSpec,
    Update,
    disk_bytes,
    plan_step,
    schedule_trace,
    straight_passes,
    straight_trace,
)
from shardwise.program.buddies import copy_bytes
from shardwise.program.image_bytes import image_bytes
from shardwise.program.schedule import Op
from shardwise.system.calibration import Calibration
from shardwise.system.units import format_bytes

SETTLED_AFTER = 2
"""Micro-batches, times the ranks of a pipeline, after which later ones hold what those before them do."""


@dataclass(frozen=True)
class Ranks:
    """Facts about the ranks: whether they compute on a CPU, how many share a host, and in bytes the memory of the
    smallest host and of the smallest accelerator, if known.

    With `calibration`, the measured rates of a host, the summary states the least time of a step.
    """

    on_cpu: bool
    num_local: int
    host_bytes: int | None = None
    device_bytes: int | None = None
    calibration: Calibration | None = None

    def on_fewer(self, mesh: Mesh) -> Ranks:
        """The same of a smaller `mesh`, of whose ranks no more share a host."""
        return replace(self, num_local=min(self.num_local, mesh.world_size))


@dataclass(frozen=True)
class Fitted:
    """A plan with `offload` in place of its budget, and a description of the result and its reason; "" without a
    budget."""

    plan: Plan
    summary: str = ""


class _Stages(NamedTuple):
    """What a rank of a pipeline does in a step, and the names of the units of each of its stages."""

    row: Sequence[Op]
    names: Mapping[int, Collection[str]]


@dataclass(frozen=True)
class _Held:
    """What one choice holds: on the device of the fullest rank, and in bytes for all ranks of a host on their devices,
    on the host and on its disk."""

    device: Footprint
    on_devices: int
    on_host: int
    on_disk: int
    time: TierTime | None
    """Of the rank whose tiers are busy longest; `None` if nothing leaves the device, or no rates are known."""


def within_budget(  # noqa: PLR0913  # a plan, what is known of its ranks, and who asks
    model: nn.Module,
    plan: Plan,
    mesh: Mesh,
    ranks: Ranks,
    updates: Mapping[nn.Parameter, Update] | None,
    states_per_param: int = 0,
    *,
    is_live: bool = False,
    activations: Sequence[Activations] | None = None,
    describes: bool = True,
) -> Fitted:
    """`plan` with the least `offload` that fits, in place of its `budget`; unchanged if it has none. The same on all
    ranks.

    `updates` says how an optimizer updates each parameter; without it, it keeps `states_per_param` for each. `is_live`:
    the model is already sharded. `activations` are those of each pipeline rank, if they have to fit too. The summary is
    left out unless it `describes`, for which each rank is planned once more; and programs are not checked then, which
    whoever searches does with what it proposes. Raises `ConfigError`, with figures, if
    nothing fits.
    """
    if not _is_meant(plan, mesh, ranks):
        return Fitted(plan)
    if is_live and (mesh.has_experts or mesh.same_params_axes):
        raise ConfigError(
            f"A live model that is split ({mesh}) has other parts on each rank, and a budget knows only one of them. "
            f"Give offload to reshard(), or the budget to shard()."
        )
    search = _Search(model, plan, mesh, ranks, updates, states_per_param, activations, checks=describes)
    found = search.least_off_device()
    found = search.least_on_disk(found)
    return Fitted(plan.with_offload(found), search.summary(found) if describes else "")


def fit_on_fewer(
    model: nn.Module,
    plan: Plan,
    mesh: Mesh,
    ranks: Ranks,
    updates: Mapping[nn.Parameter, Update] | None,
    states_per_param: int = 0,
) -> Plan:
    """`within_budget` for a `mesh` of which each rank holds more than each of the `ranks` does now; on whichever hosts
    they are. Images count as what a host holds, activations do not.

    Raises `ConfigError` too if a host, or an accelerator, has less memory than its ranks would hold.
    """
    there = ranks.on_fewer(mesh)
    fitted = within_budget(model, plan, mesh, there, updates, states_per_param).plan
    search = _Search(model, fitted, mesh, there, updates, states_per_param)
    for what, taken, room in (
        ("device", search.holds(fitted.offload).device.total, None if ranks.on_cpu else ranks.device_bytes),
        ("host", search.with_images(fitted.offload), ranks.host_bytes),
    ):
        if room is not None and taken > room:
            of = "one rank" if what == "device" else f"{there.num_local} of these ranks"
            raise ConfigError(
                f"{of} would hold {format_bytes(taken)} on a {what} of {format_bytes(room)}, without activations"
            )
    return fitted


@dataclass(frozen=True)
class HostBytes:
    """Of a host's memory."""

    held: int
    """What its ranks hold there, with images and copies of other hosts', and without activations."""
    images: int
    """Those: as much again is taken while ranks recover."""


def host_bytes_on(
    model: nn.Module,
    plan: Plan,
    mesh: Mesh,
    ranks: Ranks,
    updates: Mapping[nn.Parameter, Update] | None,
    states_per_param: int,
) -> HostBytes:
    """On the host with the most, of an elastic job on `mesh`, whose `plan` has no budget any more."""
    search = _Search(model, plan, mesh, ranks.on_fewer(mesh), updates, states_per_param)
    return HostBytes(search.with_images(plan.offload), search.images(plan.offload))


def choices_by_pp_rank(model: nn.Module, plan: Plan, mesh: Mesh) -> tuple[list[list[UnitChoice]], ExpertSplit | None]:
    """The units of each pipeline rank (of a single one without a pipeline), and the experts' split. Along other axes
    they are those of the first rank, which has at least as much as any other."""
    experts = expert_split(model, plan, mesh, 0)
    boxes = boxes_for(model, mesh, 0, split_of(model, plan, mesh, 0, experts), experts)
    choices = [replace(choice, boxes=boxes) for choice in choose_units(model, plan)]
    if not mesh.has_stages:
        return [choices], experts
    from shardwise.parallel.pipeline import stage_layout  # only plans with a pipeline load it

    return [of_params(choices, params) for params in stage_layout(model, plan, mesh).params_by_rank(model)], experts


def _stages_by_pp_rank(
    model: nn.Module, plan: Plan, mesh: Mesh, units: Sequence[Sequence[UnitChoice]]
) -> list[_Stages]:
    """By pipeline rank; empty without one. `units` are those of each."""
    if not mesh.has_stages:
        return []
    from shardwise.parallel.pipeline import stage_layout  # only plans with a pipeline load it

    layout = stage_layout(model, plan, mesh)
    most = SETTLED_AFTER * layout.num_ranks
    if plan.accumulate > most:
        layout = stage_layout(model, plan.model_copy(update={"accumulate": most}), mesh)
    by_stage = layout.params_by_stage(model)
    return [
        _Stages(
            layout.schedule.rows[pp_rank],
            {
                stage: {one.name for one in choices if not by_stage[stage].isdisjoint(one.params.values())}
                for stage in layout.at(pp_rank)
            },
        )
        for pp_rank, choices in enumerate(units)
    ]


def of_params(choices: Sequence[UnitChoice], params: Collection[torch.Tensor]) -> list[UnitChoice]:
    """The parts of the units that have `params`."""
    own = [
        replace(one, params={name: param for name, param in one.params.items() if param in params}) for one in choices
    ]
    return [one for one in own if one.params]


def _is_meant(plan: Plan, mesh: Mesh, ranks: Ranks) -> bool:
    """Whether there is a budget. Raises `ConfigError` if it contradicts the rest of the plan, or the machine."""
    check_budget(plan, mesh)
    budget = plan.budget
    if budget.device is None:
        return False
    if budget.host is not None and ranks.host_bytes is not None and budget.host > ranks.host_bytes:
        raise ConfigError(
            f"budget.host is {format_bytes(budget.host)}, and a host of this job has {format_bytes(ranks.host_bytes)} "
            f"of memory: {format_bytes(budget.host - ranks.host_bytes)} less. Allow what there is."
        )
    if ranks.device_bytes is not None and budget.device > ranks.device_bytes:
        raise ConfigError(
            f"budget.device is {format_bytes(budget.device)}, and a device of this job has "
            f"{format_bytes(ranks.device_bytes)} of memory: {format_bytes(budget.device - ranks.device_bytes)} less. "
            f"Allow what there is, and leave room for activations."
        )
    return True


class _Leaving:
    """The order in which units leave the device, the last one first, and the shares of the model that this takes."""

    def __init__(self, sizes: Sequence[tuple[str, int]], what: str, numel: int | None = None) -> None:
        """`sizes` are the elements that can leave, of `numel`: by default of these alone."""
        leaving = [(name, size) for name, size in reversed(sizes) if size]
        numel = sum(size for _, size in leaving) if numel is None else numel
        self._what = what
        self.names = [name for name, _ in leaving]
        self.shares = [
            (together - 0.5) / max(1, numel)  # so that rounding does not take one more unit
            for together in accumulate(size for _, size in leaving)
        ]

    def describe(self, share: float) -> str:
        """Such as `3 of 5 units (h.2 to head)`; "" for none."""
        count, num = sum(one <= share for one in self.shares), len(self.names)
        if not count:
            return ""
        first, last = self.names[count - 1], self.names[0]
        which = last if count == 1 else f"{first} to {last}"
        return f"all {num} {self._what}" if count == num > 1 else f"{count} of {num} {self._what} ({which})"


class _Search:
    """What each choice would hold, and the least one that fits."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        mesh: Mesh,
        ranks: Ranks,
        updates: Mapping[nn.Parameter, Update] | None,
        states_per_param: int,
        activations: Sequence[Activations] | None = None,
        *,
        checks: bool = True,
    ) -> None:
        """`checks` is that of `plan_step`."""
        self._checks = checks
        self._model, self._plan, self._mesh, self._ranks = model, plan, mesh, ranks
        self._activations = activations
        self._updates, self._states_per_param = updates, states_per_param
        self._by_pp_rank, self._experts = choices_by_pp_rank(model, plan, mesh)
        self._stages = _stages_by_pp_rank(model, plan, mesh, self._by_pp_rank)
        self._units = choose_units(model, plan)
        self._held: dict[Offload, _Held] = {}
        self._known: dict[tuple[Offload, int], tuple[StepProgram, Footprint]] = {}
        """By the pipeline rank."""
        self._known_specs: dict[Offload, list[tuple[UnitSpec, ...]]] = {}
        self._fullest = 0
        sizes = [(unit.name, unit_numel(unit)) for unit in self._units]
        are_all_trained = all(size.trained == size.all for _, size in sizes)
        self._updated = _Leaving(
            [(name, size.trained) for name, size in sizes], "units" if are_all_trained else "trained units"
        )
        self._resting = _Leaving([(name, size.all) for name, size in sizes], "units")
        self._frozen = _Leaving(
            [(name, size.all - size.trained) for name, size in sizes], "units", sum(size.all for _, size in sizes)
        )

    def least_off_device(self) -> Offload:
        """The first choice that fits every device: unit by unit, first updates on the host, then frozen parameters at
        rest there instead, then all updates and any parameters. In each of these rows all later choices fit as
        well."""
        updated = [Offload(), *(Offload(optim=share) for share in self._updated.shares)]
        frozen = [Offload(param=share) for share in self._frozen.shares]
        resting = [Offload(optim=1.0, param=share) for share in self._resting.shares]
        allowed = self._plan.budget.device or 0
        rows = [row for row in (updated, frozen, resting) if row]
        for choices in rows:
            if self._fits(choices[-1], allowed):
                found = bisect_left(choices, True, key=lambda offload: self._fits(offload, allowed))
                return choices[found]
        least = min((self.holds(row[-1]).device for row in rows), key=lambda held: held.total)
        raise ConfigError(
            f"budget.device is {format_bytes(allowed)}, but with all that can go on the host each rank still holds "
            f"{format_bytes(least.total)} on its device ({format_bytes(least.total - allowed)} too much), of which "
            f"{format_bytes(least.working)} is gathered or in flight. {self._largest()}: make units smaller, or "
            f"prefetch_bytes, or shard parameters over more ranks."
        )

    def least_on_disk(self, found: Offload) -> Offload:
        """`found`, with the states of as few units on the disk as make the rest fit the host, and then their parameters
        at rest."""
        budget, taken = self._plan.budget, self.holds(found).on_host
        if budget.host is None or taken <= budget.host:
            return found
        if budget.disk is None:
            raise self._too_much_for_host(found, [])
        choices = [_on_disk(found, share) for share in self._updated.shares if share <= found.optim]
        for choice, foreseen in zip(choices, self._on_host_beside_disk(found), strict=False):
            if foreseen <= budget.host and self.holds(choice).on_host <= budget.host:
                return choice
        table = table_for(self._plan, self._mesh).on(self._mesh)
        if table.param.shard == table.optim.shard:
            shares = [share for share in self._leaving(found).shares if share <= found.param]
            with_params = [_on_disk(found, found.optim, share) for share in shares]
            choices += with_params
            for choice in with_params:
                if self.holds(choice).on_host <= budget.host:
                    return choice
        raise self._too_much_for_host(found, choices or [found])

    def holds(self, offload: Offload) -> _Held:
        """The figures for the ranks of a host, which may have different stages."""
        if offload not in self._held:
            known = [self._of_rank(offload, pp_rank) for pp_rank in range(len(self._by_pp_rank))]
            prints = [held for _, held in known]
            times = [self._time(step, held) for step, held in known]
            on_devices = self._of_host([one.total for one in prints])
            on_host = self._of_host([one.host_total for one in prints])
            on_disk = self._of_host([one.disk_total for one in prints])
            longest = max((one for one in times if one is not None), key=lambda one: one.least_seconds, default=None)
            self._held[offload] = _Held(max(prints, key=lambda one: one.total), on_devices, on_host, on_disk, longest)
        return self._held[offload]

    def _fits(self, offload: Offload, allowed: int) -> bool:
        """Whether no rank has more than is `allowed` on its device. The one that last had is asked first, since one is
        enough."""
        others = [pp_rank for pp_rank in range(len(self._by_pp_rank)) if pp_rank != self._fullest]
        for pp_rank in (self._fullest, *others):
            if self._of_rank(offload, pp_rank)[1].total > allowed:
                self._fullest = pp_rank
                return False
        return True

    def _of_rank(self, offload: Offload, pp_rank: int) -> tuple[StepProgram, Footprint]:
        """Its step, and what it holds."""
        if (offload, pp_rank) not in self._known:
            units = self._specs(offload)[pp_rank]
            counted = None if self._activations is None else self._activations[pp_rank]
            trace = self._trace(pp_rank, units) if counted is None else counted.trace
            step = plan_step(units, trace, prefetch_bytes=self._plan.prefetch_bytes, checks=self._checks)
            held = step.footprint(
                states_per_param=self._states_per_param,
                num_micro_batches=self._plan.accumulate,
                activations=counted,
            )
            self._known[offload, pp_rank] = step, held
        return self._known[offload, pp_rank]

    def with_images(self, offload: Offload) -> int:
        """Bytes of the host's memory that its ranks take, with the images from which others go on, and the copies of
        other hosts'."""
        held = self.holds(offload)
        on_devices = held.on_devices if self._ranks.on_cpu else 0
        return held.on_host + on_devices + self.images(offload) + self._copies(offload)

    def images(self, offload: Offload) -> int:
        """Bytes of these images."""
        of_units = ([flat for unit in units for flat in unit.flats] for units in self._specs(offload))
        return self._of_host([image_bytes(flats, self._states_per_param).copy for flats in of_units])

    def _copies(self, offload: Offload) -> int:
        """Bytes of what its ranks keep for those of other hosts."""
        size, num_local = self._mesh.world_size, self._ranks.num_local
        if num_local >= size or self._plan.survive == "host":
            return 0
        hosts = [rank // num_local for rank in range(size)]
        every = ([flat for unit in units for flat in unit.flats] for units in self._specs(offload))
        return num_local * max(copy_bytes(flats, self._states_per_param, hosts).kept for flats in every)

    def _time(self, step: StepProgram, held: Footprint) -> TierTime | None:
        if self._ranks.calibration is None:
            return None
        return tier_time(
            step,
            held,
            self._ranks.calibration,
            num_micro_batches=self._plan.accumulate,
            num_local=self._ranks.num_local,
            folder=self._plan.budget.disk,
        )

    def _trace(self, pp_rank: int, units: tuple[UnitSpec, ...]) -> Trace:
        """The order in which they are used in a micro-batch, or in all of a step that goes through stages."""
        if not self._stages:
            return straight_trace(units)
        stages = self._stages[pp_rank]
        of_stages = {stage: [unit for unit in units if unit.name in names] for stage, names in stages.names.items()}
        return schedule_trace(stages.row, straight_passes(stages.row, of_stages))

    def summary(self, found: Offload) -> str:
        """What was chosen and why, in a few lines."""
        budget, held, without = self._plan.budget, self.holds(found), self.holds(Offload())
        allowed = budget.device or 0
        picked = self._picked(found)
        lines = [f"budget: {picked}"]
        why = f"each device holds {format_bytes(held.device.total)} of the {format_bytes(allowed)} allowed"
        if found != Offload():
            why += f", and would hold {format_bytes(without.device.total)} with all of it there"
        lines.append(f"  {why}")
        if held.on_host:
            of = f" of the {format_bytes(budget.host)} allowed" if budget.host is not None else ""
            shared = f" to its {self._ranks.num_local} ranks" if self._ranks.num_local > 1 else ""
            why = f"a host holds {format_bytes(held.on_host)}{of}{shared}"
            if found.optim_disk:
                beside = self.holds(_on_disk(found, 0.0)).on_host
                why += f", and would hold {format_bytes(beside)} without the disk"
            lines.append(f"  {why}")
        if held.on_disk:
            lines.append(f"  its disk holds {format_bytes(held.on_disk)} in {budget.disk}")
        if held.time is not None:
            lines += [f"  {line}" for line in held.time.bounds]
        return "\n".join(lines)

    def _picked(self, found: Offload) -> str:
        if found == Offload():
            return "nothing has to leave the device"
        parts = []
        if updated := self._updated.describe(found.optim):
            parts.append(f"gradients, states and update of {updated} are on the host")
        if on_disk := self._updated.describe(found.optim_disk):
            parts.append(f"the states of {on_disk} on a disk")
        if resting := self._leaving(found).describe(found.param):
            below = self._leaving(found).describe(found.param_disk)
            but = f", but those of {below} on the disk" if below else ""
            which = "" if found.optim else "frozen "
            parts.append(f"{which}parameters of {resting} rest on the host{but}")
        return "; ".join(parts)

    def _leaving(self, found: Offload) -> _Leaving:
        """The units whose parameters rest on the host: without updates there, those with frozen ones."""
        return self._resting if found.optim else self._frozen

    def _specs(self, offload: Offload) -> list[tuple[UnitSpec, ...]]:
        """The units of each pipeline rank."""
        if offload not in self._known_specs:
            rows = rows_for(self._model, self._plan.with_offload(offload), self._mesh, self._experts)
            on_cpu = self._ranks.on_cpu
            every = (
                unit_specs(choices, rows, self._mesh, self._updates, on_cpu=on_cpu) for choices in self._by_pp_rank
            )
            self._known_specs[offload] = [tuple(spec for spec in specs if spec.flats) for specs in every]
        return self._known_specs[offload]

    def _of_host(self, by_rank: Sequence[int]) -> int:
        """Bytes of all ranks of a host, from those of one rank at each pipeline rank."""
        num_local, size = self._ranks.num_local, self._mesh.world_size
        return num_local * max(by_rank) if num_local < size else sum(by_rank) * (size // len(by_rank))

    def _on_host_beside_disk(self, found: Offload) -> list[int]:
        """What a host would hold, within a few pages, with the states of one, two, ... units on the disk."""
        before, after = self._specs(found), self._specs(_on_disk(found, found.optim))
        resting, foreseen = self.holds(found).on_host, []
        names = self._updated.names
        for count in range(1, len(names) + 1):
            there = set(names[:count])
            saved = [self._saved(*units, there) for units in zip(before, after, strict=True)]
            foreseen.append(resting - self._of_host(saved))
        return foreseen

    def _saved(self, units: Sequence[UnitSpec], moved: Sequence[UnitSpec], there: Collection[str]) -> int:
        """Bytes of host memory that a rank frees with the states of the units `there` on the disk; `moved` has the
        sizes of their files."""
        files, left = [], 0
        for unit, same in zip(units, moved, strict=True):
            for flat, of_disk in zip(unit.flats, same.flats, strict=True) if unit.name in there else ():
                if of_disk.updates_from_disk:
                    files.append(disk_bytes(of_disk, None, self._states_per_param))
                    optim = flat.table.optim
                    left += flat.num_bytes(optim.shard, optim.dtype) if flat.master_is_param else 0
        return sum(files) - left - min(NUM_DISK_BUFFERS, len(files)) * max(files, default=0)

    def _too_much_for_host(self, found: Offload, choices: Sequence[Offload]) -> ConfigError:
        budget, num_local = self._plan.budget, self._ranks.num_local
        device, host = format_bytes(budget.device or 0), budget.host or 0
        ranks = f"{num_local} ranks" if num_local > 1 else "1 rank"
        if not choices:
            taken = self.holds(found).on_host
            return ConfigError(
                f"To fit {device} on each device, {ranks} would take {format_bytes(taken)} of their host's memory: "
                f"{format_bytes(taken - host)} more than budget.host. {self._largest()}. Allow more of either, shard "
                f"over more hosts, or name a folder on a local disk for states: budget.disk."
            )
        taken = min(self.holds(choice).on_host for choice in choices)
        return ConfigError(
            f"To fit {device} on each device, {ranks} would take {format_bytes(taken)} of their host's memory beside "
            f"the disk: {format_bytes(taken - host)} more than budget.host. {self._largest()}, of whose states "
            f"{NUM_DISK_BUFFERS} buffers are in memory. Allow more of either, make units smaller, or shard over more "
            f"hosts."
        )

    def _largest(self) -> str:
        largest = max(self._units, key=lambda unit: sum(param.numel() for param in unit.params.values()))
        numel = sum(param.numel() for param in largest.params.values())
        return f"The largest unit is {largest.name}, with {numel:,} parameters"


def _on_disk(offload: Offload, states: float, params: float = 0.0) -> Offload:
    """`offload` with other shares of states and of parameters on a disk."""
    return offload.model_copy(update={"optim_disk": states, "param_disk": params})
