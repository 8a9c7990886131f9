"""Finds errors and unwise choices in a plan for this machine, before a job runs."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from shardwise.cli.checks import Check
from shardwise.errors import ShardwiseError
from shardwise.plan import Plan, load_plan
from shardwise.plan.placement import Table, check_budget, check_offload, mesh_for, table_for
from shardwise.system.machine import SLOW_BF16, TorchFacts
from shardwise.system.named_folder import folder_of


def lint(source: str, world_size: int, facts: TorchFacts, num_cores: int) -> list[Check]:
    """All findings for the plan in `source`, on `world_size` ranks of this machine; a single `ok` if there are none."""
    try:
        plan = load_plan(source)
        if plan.precision == "auto":
            plan = importlib.import_module("shardwise.optim.precision.auto_precision").settled_here(plan)
        mesh = mesh_for(plan, world_size)
        table = table_for(plan, mesh).on(mesh)
        check_offload(plan, mesh)
        check_budget(plan, mesh)
    except ShardwiseError as error:
        return [Check("plan", "fail", str(error), "`shardwise explain PLAN --world N` shows what a plan does.")]
    found = [
        *_of_ranks(world_size, facts, num_cores),
        *_of_numbers(plan, facts),
        *_of_files(plan),
        *_of_tiers(plan, table),
    ]
    found += [*_of_compiling(plan, facts, os.environ)]
    return found or [Check("plan", "ok", f"{source} on {world_size} ranks")]


def _of_ranks(world_size: int, facts: TorchFacts, num_cores: int) -> Iterator[Check]:
    if facts.gpus and world_size > len(facts.gpus):
        found = f"{world_size} ranks, but this machine has {len(facts.gpus)} GPUs"
        yield Check("plan ranks", "warn", found, "Give each rank a GPU; otherwise all ranks on this host use the CPU.")
    elif not facts.gpus and world_size > num_cores:
        found = f"{world_size} ranks, but this machine has {num_cores} cores"
        yield Check("plan ranks", "warn", found, "Ranks would take turns: start at most one per core.")


def _of_numbers(plan: Plan, facts: TorchFacts) -> Iterator[Check]:
    if facts.gpus:
        return
    if plan.precision == "fp16":
        cure = "On CPUs fp16 is slow, and it may overflow: use bf16 or fp32."
        yield Check("plan precision", "warn", "fp16 without a GPU", cure)
    if plan.precision == "bf16" and facts.bf16_ratio > SLOW_BF16:
        found = f"bf16 on a processor whose products take {facts.bf16_ratio:.0f} times as long as in fp32"
        yield Check("plan precision", "warn", found, "Set precision: auto, or fp32.")


def _of_files(plan: Plan) -> Iterator[Check]:
    """The folders that the plan names, and the packages of its trackers."""
    trackers = importlib.import_module("shardwise.observe.trackers")
    try:
        trackers.check_trackers(plan.trackers or {}, plan.run)
    except ShardwiseError as error:
        yield Check("plan trackers", "fail", str(error), "Install it, or remove the tracker.")
    if plan.profile.steps is not None and plan.profile.folder is None and plan.run is None:
        yield Check("plan profile", "fail", "profile.steps, but no folder for traces", "Set profile.folder or run.")
    for name, named in (("run", plan.run), ("profile.folder", plan.profile.folder)):
        if named is None:
            continue
        try:
            is_possible, found = _can_be_made(folder_of(named, name)), f"{named} cannot be written"
        except ShardwiseError as error:
            is_possible, found = False, str(error)
        if not is_possible:
            yield Check(f"plan {name}", "fail", found, "Name a folder of yours.")
    for name, folder in (("disk", plan.disk), ("budget.disk", plan.budget.disk)):
        if folder is not None:
            yield from _of_disk(name, folder)


def _of_tiers(plan: Plan, table: Table) -> Iterator[Check]:
    """What lies on a disk needs a folder."""
    needs = [f"row {name}" for name, row in (("optim", table.optim), ("param", table.param)) if row.tier == "disk"]
    needs += [f"offload.{key}" for key in ("optim_disk", "param_disk") if getattr(plan.offload, key) > 0]
    needs += ["activations"] if plan.activations.policy == "disk" else []
    for name, rule in plan.rules.items():
        if "disk" in (rule.rows.optim.tier, rule.rows.param.tier, rule.activations.policy):
            needs.append(f"rule {name}")
    if needs and plan.disk is None:
        cure = "Name one on a local disk, used by this job only: disk: /scratch/run."
        yield Check("plan disk", "fail", f"no folder for what is on a disk ({', '.join(needs)})", cure)


def _of_disk(name: str, named: str) -> Iterator[Check]:
    try:
        folder = folder_of(named)
    except ShardwiseError as error:
        yield Check(f"plan {name}", "fail", str(error), "Name a folder on a disk of this machine.")
        return
    if not _can_be_made(folder):
        yield Check(f"plan {name}", "fail", f"{folder} cannot be written", "Name a folder on a disk of this machine.")
        return
    mounts = importlib.import_module("shardwise.system.disk.mounts")
    try:
        told = mounts.check_local(folder)
    except ShardwiseError as error:
        yield Check(f"plan {name}", "fail", str(error), "Name a folder on a disk of this machine.")
        return
    if told is not None:
        yield Check(f"plan {name}", "warn", told, "A local NVMe disk is much faster.")


def _of_compiling(plan: Plan, facts: TorchFacts, environ: Mapping[str, str]) -> Iterator[Check]:
    compiler = environ.get("CXX", "g++")
    if plan.compile == "inductor" and not facts.gpus and shutil.which(compiler) is None:
        yield Check("plan compile", "fail", f"inductor needs {compiler}", "Install a C++ compiler, or remove compile.")


def _can_be_made(folder: Path) -> bool:
    place = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    return place.is_dir() and os.access(place, os.W_OK)
