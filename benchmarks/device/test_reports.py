"""A plugin of pytest, `-p benchmarks.device.test_reports --told FILE`: how the tests go, written after each of them.

A run that is stopped, by whatever means, has then named what failed, and what was running. The file is that of a part:
counts, a row for each test that failed, and the names of those that have begun and not ended.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.results_file import write_result

TRACE_LENGTH = 3000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--told", type=Path, required=True, help="the file to be written")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # workers of xdist send their reports to the process that started them
        config.pluginmanager.register(TestReports(config.getoption("--told")))


class TestReports:
    """What pytest's hooks say, in the process that collects the reports."""

    __test__ = False

    def __init__(self, file: Path) -> None:
        self._file = file
        self._outcomes: dict[str, str] = {}
        self._running: dict[str, None] = {}
        self._rows: list[dict[str, Any]] = []
        self._write()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = None
        self._write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One of a test's three: its setup, its call and its teardown."""
        if report.failed:
            self._outcomes[report.nodeid] = "failed"
            self._rows.append(row_of(report))
        else:
            outcome = "skipped" if report.skipped else "passed"
            if self._outcomes.get(report.nodeid, "passed") == "passed":
                self._outcomes[report.nodeid] = outcome
        if report.when not in ("setup", "call"):  # its teardown, or xdist's report that a worker has crashed
            self._running.pop(report.nodeid, None)
        self._write()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._rows.append(row_of(report))
            self._write()

    def _write(self) -> None:
        ended = Counter(outcome for name, outcome in self._outcomes.items() if name not in self._running)
        counts = {name: ended[name] for name in ("passed", "failed", "skipped")}
        write_result(self._file, {**counts, "running": [short(name) for name in self._running], "rows": self._rows})


def row_of(report: pytest.TestReport | pytest.CollectReport) -> dict[str, Any]:
    text = report.longreprtext
    crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", None)
    told = str(crash or text[-400:] or "no reason").strip()
    return {"name": short(report.nodeid), "error": told[:400], "trace": text[-TRACE_LENGTH:]}


def short(nodeid: str) -> str:
    """`test_training::test_presets[...]` for a test's full name."""
    path, _, name = nodeid.partition("::")
    return f"{Path(path).stem}::{name}"
