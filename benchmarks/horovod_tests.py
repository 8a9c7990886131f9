"""`python benchmarks/horovod_tests.py CHECKOUT [FILE ...]`: runs Horovod's own tests on our `integrations.horovod`.

CHECKOUT is a folder with Horovod's repository, such as `git clone https://github.com/horovod/horovod` makes; nothing is
fetched. FILE is relative to its `test/parallel`; the default is `test_torch.py`. The tests are run unmodified by pytest
on each rank of one job, which has to have the libraries that they import: `cloudpickle`, `mock`, `parameterized`,
`tensorflow`. A test counts as passed if it passed on every rank, as failed if it failed or was not reached on one.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import pytest

PACKAGES = ("shardwise", "torch", "tensorflow", "tensorflow-cpu", "pytest")
TEST_SECONDS = 60
HELPERS = ("horovod.runner.util.threads",)
"""Modules of Horovod that its tests' own helpers import, and that are no part of its API."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT")
    parser.add_argument("files", nargs="*", default=["test_torch.py"], metavar="FILE")
    parser.add_argument("--nproc", type=int, default=2, metavar="N", help="ranks (default: 2)")
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="only these tests, as in pytest")
    parser.add_argument("--results-of-rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.results_of_rank is not None:
        return run_on_this_rank(args.checkout, args.files[0], args.k, args.results_of_rank)
    print(", ".join(f"{name} {version}" for name in PACKAGES if (version := version_of(name))))
    print(f"Horovod {horovod_version(args.checkout)}, {args.nproc} ranks")
    return max(run(args.checkout, file, args.nproc, args.k) for file in args.files)


def run(checkout: Path, file: str, num_ranks: int, expression: str) -> int:
    """Run one file in a job of its own and print its counts; returns 0 if nothing failed."""
    with tempfile.TemporaryDirectory() as folder:
        launch = [sys.executable, "-m", "shardwise", "launch", "--nproc", str(num_ranks), "--as-horovod"]
        script = [__file__, str(checkout), file, "--results-of-rank", folder, "-k", expression]
        job = subprocess.run(
            [*launch, *script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        of_ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    if not any(of_ranks):
        print(f"{file}: no test could be collected\n{job.stdout}")
        return 1
    names = dict.fromkeys(name for one in of_ranks for name in one)
    verdicts = {name: verdict([one.get(name, "not reached") for one in of_ranks], num_ranks) for name in names}
    counts = collections.Counter(one.partition(":")[0] for one in verdicts.values())
    print(
        f"{file}: {counts['passed']} of {len(verdicts)} passed, {counts['failed']} failed, {counts['skipped']} skipped"
    )
    for name, one in verdicts.items():
        if one.startswith("failed"):
            print(f"  {name}: {one.partition(': ')[2][:300]}")
    return int(counts["failed"] > 0)


def verdict(of_ranks: list[str], num_ranks: int) -> str:
    """What all ranks say of a test, or what the first of those says for which it failed."""
    if len(of_ranks) == num_ranks and len(set(of_ranks)) == 1 and of_ranks[0] in ("passed", "skipped"):
        return of_ranks[0]
    bad = next((one for one in of_ranks if one not in ("passed", "skipped")), "not the same on all ranks")
    return f"failed: {bad}"


def run_on_this_rank(checkout: Path, file: str, expression: str, folder: Path) -> int:
    tests = checkout / "test" / "parallel"
    sys.path[:0] = [str(tests), str(tests.parent / "utils")]  # where they import their helpers from
    for name in HELPERS:
        spec = importlib.util.spec_from_file_location(name, checkout / f"{name.replace('.', '/')}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    results = Results(folder / f"{os.environ['RANK']}.json")
    options = ["-q", "-p", "no:cacheprovider", f"--timeout={TEST_SECONDS}", "--rootdir", str(tests)]
    return int(pytest.main([str(tests / file), "-k", expression, *options], plugins=[results]))


class Results:
    """A plugin of pytest that writes what became of each test, as soon as it is known."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._of: dict[str, str] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._of = dict.fromkeys((item.name for item in session.items), "not reached")
        self._write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("::")[2]
        if report.when == "call" or report.outcome != "passed":
            crash = getattr(report.longrepr, "reprcrash", None)
            said = f"failed: {crash.message if crash else report.longrepr}".replace("\n", " ")
            self._of[name] = said if report.outcome == "failed" else report.outcome
            self._write()

    def _write(self) -> None:
        self._path.write_text(json.dumps(self._of))


def version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def horovod_version(checkout: Path) -> str:
    lines = (checkout / "horovod" / "__init__.py").read_text().splitlines()
    return next(line.partition("=")[2].strip(" '\"") for line in lines if line.startswith("__version__"))


if __name__ == "__main__":
    sys.exit(main())
