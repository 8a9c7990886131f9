"""The estimated time of offload in a step, from the calibration of a machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.cli.explanation import EXAMPLE_NUMEL, Explanation, Subject, example_units, explain
from shardwise.cli.main import main
from shardwise.plan import Plan
from shardwise.plan.placement import mesh_for, preset, table_for
from shardwise.system.calibration import Calibration, DiskFigures, HostFigures, LinkFigures, write_calibration

DISK = DiskFigures(2e9, 1e9, 8, 2**20, True, "today")
HOST = HostFigures(10e9, 5e8, 2, "today")
MEASURED = Calibration("node7", {"/scratch": DISK}, HOST)
NUMEL = 4 * EXAMPLE_NUMEL // 2
"""That one of two ranks updates."""


def explained(plan: Plan, calibration: Calibration | None) -> Explanation:
    mesh = mesh_for(plan, 2)
    table = table_for(plan, mesh)
    known_from = preset(plan.preset).known_from
    return explain(plan, mesh, table, known_from, Subject(example_units(table, mesh, plan)), calibration)


def test_ranks_of_a_host_share_its_disk_and_memory() -> None:
    tiers = explained(Plan(preset="infinity", disk="/scratch/run"), MEASURED).tiers
    assert tiers is not None
    found = {work.what: work for work in tiers.work}
    assert found["updated on the host"].amount == NUMEL
    assert found["updated on the host"].seconds == pytest.approx(2 * NUMEL / 5e8)
    assert found["read from the disk"].seconds == pytest.approx(2 * 12 * NUMEL / 2e9)
    assert found["written to the disk"].seconds == pytest.approx(2 * 12 * NUMEL / 1e9)
    assert found["to the host"].seconds == pytest.approx(2 * 4 * NUMEL / 10e9)
    assert tiers.longest is not None
    assert tiers.longest == ("disk", pytest.approx(2 * 12 * NUMEL * (1 / 2e9 + 1 / 1e9)))
    assert "because the disk, which 2 ranks share, is busy for that time (measured on node7)" in tiers.lines[-1]
    assert not tiers.missing


def test_a_device_has_a_link_of_its_own() -> None:
    links = replace(MEASURED, links=LinkFigures(1e9, 1e9, 1e6, 2e6, "today"))
    tiers = explained(Plan(preset="zero3-offload"), links).tiers
    assert tiers is not None
    found = {work.what: work.seconds for work in tiers.work}
    assert found["to the host"] == pytest.approx(4 * NUMEL / 2e6)
    assert found["from the host"] == pytest.approx(4 * NUMEL / 1e6)
    assert tiers.longest == ("link", pytest.approx(4 * NUMEL * (1 / 1e6 + 1 / 2e6)))


def test_what_is_not_measured_is_named() -> None:
    tiers = explained(Plan(preset="infinity", disk="/elsewhere"), MEASURED).tiers
    assert tiers is not None
    assert tiers.missing == ("shardwise bench disk /elsewhere",)
    assert tiers.longest is not None
    assert tiers.longest[0] == "update"
    nothing = explained(Plan(preset="offload"), None).tiers
    assert nothing is not None
    assert nothing.longest is None
    assert nothing.lines[-1] == "To estimate times, run shardwise bench host on this machine."
    assert explained(Plan(preset="zero3"), MEASURED).tiers is None


def test_the_nearest_folder_above_that_was_measured_counts() -> None:
    other = replace(DISK, depth=3)
    measured = replace(MEASURED, disks={"/scratch": DISK, "/scratch/fast": other})
    assert measured.disk_at("/scratch/fast/run") == other
    assert measured.disk_at("/scratch/run") == measured.disk_at("/scratch") == DISK
    assert measured.disk_at("/scratchy") is None


def test_explain_reads_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_calibration(MEASURED, tmp_path / "calibration.json")
    words = ["explain", "infinity", "--world", "2", "--set", "disk=/scratch/run", "--calibration", str(file)]
    assert main(words) == 0
    assert "A step takes at least" in " ".join(capsys.readouterr().out.split())
    assert main([*words, "--json"]) == 0
    tiers = json.loads(capsys.readouterr().out)["tiers"]
    assert tiers["longest"]["what"] == "disk"
    assert tiers["missing"] == []
    file.write_text("{}")
    assert main(words) == 2
    assert "is not a calibration that can be read" in capsys.readouterr().err
