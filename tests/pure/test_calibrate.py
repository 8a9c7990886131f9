"""Calibration of a machine: the best setting, what is stored, and that no file is left over."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwise.cli.main import main
from shardwise.errors import ConfigError, TierError
from shardwise.fit.calibrate import disk, host, links
from shardwise.fit.calibrate.disk import DiskRow, Grid, bounded, measure_disk
from shardwise.fit.calibrate.host import HostRow, measure_host
from shardwise.system.calibration import (
    Calibration,
    DiskFigures,
    HostFigures,
    LinkFigures,
    default_path,
    read_calibration,
    write_calibration,
)
from shardwise.system.disk import PAGE, Holder, TierFolder

FULL = Calibration(
    "here",
    {"/scratch": DiskFigures(2e9, 1e9, 8, 2**20, True, "2026-01-01T00:00:00+00:00")},
    HostFigures(1e10, 1e9, 4, "2026-01-01T00:00:00+00:00"),
    LinkFigures(5e9, 1e9, 0.0, 0.0, "2026-01-01T00:00:00+00:00"),
)


def row(depth: int, block_bytes: int, rate: float, *, is_direct: bool = True) -> DiskRow:
    return DiskRow(block_bytes, depth, is_direct, rate, rate)


def test_the_best_setting_is_the_smallest_of_the_fast_ones() -> None:
    rows = [row(1, 2**20, 500), row(4, 2**20, 985), row(2, 2**21, 980), row(16, 2**24, 1000), row(8, 2**20, 990)]
    assert disk.best_of(rows) is rows[2], "as much under way as 4 of 1 MiB, in fewer requests"
    assert disk.best_of([*rows, row(1, PAGE, 5000, is_direct=False)]) is rows[2], "the cache does not count"
    assert disk.best_of([row(1, PAGE, 10, is_direct=False)]).depth == 1, "unless there is nothing else"
    assert DiskRow(PAGE, 1, True, 100, 300).both == pytest.approx(150)
    assert host.best_of([HostRow(1, 1, 60), HostRow(2, 1, 98), HostRow(4, 1, 100)]).num_threads == 2
    assert bounded(2**29, 2**28) == 2**26
    assert bounded(2**29, 100) == PAGE
    assert bounded(2**20 + 1, 2**40) == 2**20


def test_a_disk_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    told: list[DiskRow] = []
    grid = Grid((PAGE, 2**16), (1, 3), 2**18, 0.01)
    rows = measure_disk(tmp_path, grid, told.append)
    assert rows == told
    assert len(rows) == grid.num_settings == 5
    assert [(one.block_bytes, one.depth) for one in rows[:-1]] == [(PAGE, 1), (PAGE, 3), (2**16, 1), (2**16, 3)]
    assert not rows[-1].is_direct
    assert all(one.write_bytes_per_second > 0 < one.read_bytes_per_second for one in rows)
    assert not list(tmp_path.iterdir())

    def interrupt(_: DiskRow) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_disk(tmp_path, grid, interrupt)
    assert not list(tmp_path.iterdir())


def test_what_is_found_is_kept_and_read_again(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "calibration.json"
    assert read_calibration(file).disks == {}
    assert write_calibration(FULL, file) == file
    assert read_calibration(file) == FULL
    assert read_calibration(write_calibration(replace(FULL, links=None), file)) == replace(FULL, links=None)
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    good = json.loads(FULL.to_json())
    for bad in (
        good | {"version": 2},
        good | {"memory": {"copy_bytes_per_second": 1.0}},
        good | {"memory": good["memory"] | {"num_threads": "4"}},
        good | {"links": good["links"] | {"to_device_bytes_per_second": -1.0}},
        good | {"disks": []},
        [],
    ):
        file.write_text(json.dumps(bad))
        with pytest.raises(ConfigError, match="is not a calibration that can be read"):
            read_calibration(file)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "QUICK_BLOCKS", (2**16,))
    monkeypatch.setattr(host, "QUICK_NUMEL", 2**12)
    monkeypatch.setattr(links, "between_ranks", lambda num_bytes, *, shares_memory: 2e9 if shares_memory else 1e9)
    monkeypatch.setattr(links.TorchAccelerator, "found", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "scratch"
    assert main(["bench", "disk", str(folder), "--quick", "--size", "512KiB"]) == 0
    assert not folder.exists(), "it was made to be measured"
    shown = capsys.readouterr().out
    assert "write /s" in shown
    assert f"Best for {folder}: " in shown
    assert str(default_path()) in shown
    assert main(["bench", "host", "--quick", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"]["adam_elements_per_second"] > 0
    assert main(["bench", "links", "--quick"]) == 0
    assert "no device" in capsys.readouterr().out
    kept = read_calibration()
    assert kept.disks[str(folder)].depth in disk.QUICK_DEPTHS
    assert kept.memory is not None
    assert kept.memory.num_threads == found["best"]["num_threads"]
    assert kept.links is not None
    assert (kept.links.shared_memory_bytes_per_second, kept.links.to_device_bytes_per_second) == (2e9, 0)
    default_path().write_text("{}")
    assert main(["bench", "host", "--quick"]) == 2
    assert "Remove it" in capsys.readouterr().err


def test_a_file_too_small_to_measure_with_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whoever wants it small, the caller or the disk; nothing is kept of it."""
    kept = tmp_path / "calibration.json"
    command = ["bench", "disk", str(tmp_path / "scratch"), "--quick", "--calibration", str(kept)]
    for size in ("0", "4KiB", "31MiB"):
        assert main([*command, "--size", size]) == 2
        assert "too small: 8 requests of 4.0 MiB at once need 32.0 MiB" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(disk.SystemCalls, "free_bytes", lambda *_: 2**26)
        assert main(command) == 2
        assert "has 64.0 MiB free. Measuring needs a file of 32.0 MiB" in capsys.readouterr().err
        assert main(["bench", "disk", str(tmp_path / "scratch"), "--calibration", str(kept)]) == 2
        assert "or measure with --quick, which needs 128.0 MiB" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    grid = Grid((PAGE,), (1,), 2**18, 0.01)
    monkeypatch.setattr(disk.SystemCalls, "free_bytes", lambda *_: 2**19)
    assert len(measure_disk(tmp_path, grid)) == 2
    assert "a file of 128.0 KiB is measured instead of 256.0 KiB" in caplog.text


def test_figures_that_cannot_be_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What can be known before is refused before anything is measured; otherwise the figures are shown first."""
    monkeypatch.setattr(host, "QUICK_NUMEL", 2**12)
    with monkeypatch.context() as patch:
        patch.setattr(host, "measure_host", lambda *_: pytest.fail("measured"))
        assert main(["bench", "host", "--quick", "--calibration", str(tmp_path)]) == 2
        assert f"{tmp_path} is a folder. Name a file" in capsys.readouterr().err
        (tmp_path / "file").write_text("")
        assert main(["bench", "host", "--quick", "--calibration", str(tmp_path / "file" / "below.json")]) == 2
        assert "cannot be written" in capsys.readouterr().err

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shardwise.cli.tier_bench.write_calibration", full)
    assert main(["bench", "host", "--quick", "--calibration", str(tmp_path / "kept.json")]) == 2
    shown = capsys.readouterr()
    assert "AdamW elements /s" in shown.out
    assert "No space left on device), so the figures above are not kept" in shown.err
    assert not (tmp_path / "kept.json").exists()


def test_a_folder_of_which_other_ranks_are_in_use_is_not_measured(tmp_path: Path) -> None:
    place = TierFolder(tmp_path, rank=5, job="another")
    with pytest.raises(TierError, match="is being used by process"):
        measure_disk(tmp_path, Grid((PAGE,), (1,), 2**18, 0.01))
    place.close()
    assert not list(tmp_path.iterdir())


def test_a_folder_in_use_is_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = TierFolder(tmp_path)
    assert main(["bench", "disk", str(tmp_path), "--quick", "--calibration", str(tmp_path / "file.json")]) == 2
    assert f"is being used by {Holder.me()}" in capsys.readouterr().err
    place.close()


def test_host_memory_is_measured_by_threads() -> None:
    before = torch.get_num_threads()
    rows = measure_host([1, 3], numel=1000)
    assert [one.num_threads for one in rows] == [1, 3]
    assert all(one.copy_bytes_per_second > 0 < one.adam_elements_per_second for one in rows)
    assert torch.get_num_threads() == before


def test_a_folder_is_found_by_how_a_plan_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", "/scratch")
    monkeypatch.setenv("HOME", "/home/someone")
    figures = DiskFigures(1.0, 2.0, 4, 2**20, True, "2026-11-24")
    known = Calibration(disks={"/scratch/run": figures, "/home/someone/tier": figures})
    assert known.disk_at("$SCRATCH/run/3") is figures
    assert known.disk_at("~/tier") is figures
    assert known.disk_at("$HOME/other") is None


def test_a_folder_is_found_where_links_lead(tmp_path: Path) -> None:
    figures = DiskFigures(1.0, 2.0, 4, 2**20, True, "2026-11-24")
    nvme, named = tmp_path / "nvme", tmp_path / "scratch"
    nvme.mkdir()
    named.symlink_to(nvme)
    assert Calibration(disks={str(nvme): figures}).disk_at(named / "run") is figures
