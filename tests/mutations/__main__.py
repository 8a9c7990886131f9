"""Does the suite catch what it should? Seeds the faults of `faults.py`, one at a time, into copies of the source.

python -m tests.mutations                        # all: minutes
python -m tests.mutations --only schedule norm   # those whose name has one of these texts
python -m tests.mutations --list

Each fault has to make one of its tests fail: it is `caught`. One whose tests all pass has `survived`: a test is
missing. `slow` were those whose tests did not end in time, `gone` those whose text is no longer in the source. Exits
with 1 unless all were caught.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Literal

import pytest

from tests.mutations.faults import FAULTS, Fault
from tests.mutations.swapping import put_in

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
_QUIETLY = ("-q", "--tb=no", "--timeout=120", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={ROOT}")
Verdict = Literal["caught", "survived", "slow", "gone", "unclear"]


@dataclass(frozen=True)
class Result:
    fault: Fault
    verdict: Verdict
    seconds: float
    by: str = ""
    """The test that failed, or why there is no verdict."""

    def __str__(self) -> str:
        return f"{self.verdict:9}{self.seconds:6.1f} s  {self.fault.name}" + (f"  [{self.by}]" if self.by else "")


class FaultError(Exception):
    """A fault cannot be seeded."""


def seeded(fault: Fault, sources: Mapping[Path, str]) -> tuple[Path, str]:
    """The file that has the text of `fault`, and its text with the fault. Raises `FaultError` unless it is there
    exactly once."""
    found = [path for path, text in sources.items() if fault.old in text]
    number = sum(sources[path].count(fault.old) for path in found)
    if number != 1:
        where = ", ".join(str(path) for path in found) or "no file"
        raise FaultError(f"its text is there {number} times, in {where}")
    return found[0], sources[found[0]].replace(fault.old, fault.new)


def files_of(names: Collection[str], tests: Path) -> list[Path]:
    """The files of tests with these names, wherever in `tests` they are."""
    every = _by_name(tests)
    for name in names:
        if len(paths := every[name]) != 1:
            raise FaultError(f"there are {len(paths)} files test_{name}.py")
    return [path for name in names for path in every[name]]


@cache
def _by_name(tests: Path) -> Mapping[str, list[Path]]:
    found = defaultdict(list)
    for path in tests.rglob("test_*.py"):
        if not {"extras", "cluster"} & set(path.parts):
            found[path.stem.removeprefix("test_")].append(path)
    return found


def sources_in(folder: Path) -> dict[Path, str]:
    return {path.relative_to(folder): path.read_text() for path in sorted(folder.rglob("*.py"))}


def tried(fault: Fault, sources: Mapping[Path, str], limit_seconds: float) -> Result:
    """Seed `fault` into a copy of the source, and run its tests with that until one fails."""
    started = time.monotonic()
    try:
        path, text = seeded(fault, sources)
        files = files_of(fault.tests, ROOT / "tests")
    except FaultError as error:
        return Result(fault, "gone", 0.0, str(error))
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy = Path(folder, "src")  # for processes that tests start
        shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        (copy / path).write_text(text)
        verdict, by = _run(files, (path, text), copy, Path(folder, "output"), limit_seconds)
    return Result(fault, verdict, time.monotonic() - started, by)


def _run(
    files: list[Path], fault: tuple[Path, str], source: Path, output: Path, limit_seconds: float
) -> tuple[Verdict, str]:
    """Run the tests in a fork of this process, which has imported them."""
    pid = os.fork()
    if pid == 0:
        _be_tests(files, fault, source, output)
    until = time.monotonic() + limit_seconds
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > until:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "slow", ""
        time.sleep(0.05)
    code = os.waitstatus_to_exitcode(ended[1])
    said = output.read_text(errors="replace") if output.exists() else ""
    if code == pytest.ExitCode.OK:
        return "survived", ""
    failed = next((line.split(" - ")[0] for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
    if code in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):
        return "caught", failed.rpartition("/")[2]
    return ("caught", f"ended with {code}") if code < 0 else ("unclear", said[-300:])


def _be_tests(files: list[Path], fault: tuple[Path, str], source: Path, output: Path) -> None:
    os.setpgid(0, 0)
    code: int = pytest.ExitCode.INTERNAL_ERROR
    try:
        handle = os.open(output, os.O_WRONLY | os.O_CREAT, 0o644)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        os.environ.update(PYTHONPATH=f"{source}:{ROOT}", PYTHONDONTWRITEBYTECODE="1")
        put_in(*fault, SOURCE)
        code = pytest.main(["-x", *_QUIETLY, *map(str, files)])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(int(code))


def import_tests(faults: Iterable[Fault]) -> None:
    """All that the faults name, here and now, and with them the source."""
    files = set()
    for fault in faults:
        with contextlib.suppress(FaultError):
            files.update(files_of(fault.tests, ROOT / "tests"))
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        pytest.main(["--collect-only", *_QUIETLY, *sorted(map(str, files))])


def results(faults: Iterable[Fault], limit_seconds: float, num_jobs: int) -> Iterator[Result]:
    sources = sources_in(SOURCE)
    with ThreadPoolExecutor(num_jobs) as pool:
        yield from pool.map(partial(tried, sources=sources, limit_seconds=limit_seconds), faults)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutations", description="Seed faults, and see whether tests catch them."
    )
    parser.add_argument("--only", nargs="*", default=[""], help="faults whose name has one of these texts")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for the tests of one fault")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument("--list", action="store_true", help="only print the faults")
    options = parser.parse_args(words)
    chosen = [fault for fault in FAULTS if any(text in fault.name for text in options.only)]
    if options.list:
        print(*(f"{fault.name}  ({' '.join(fault.tests)})" for fault in chosen), sep="\n")
        return 0
    os.chdir(ROOT)
    os.environ["THOROUGH"] = "mutations"  # see `divided` in tests/thorough.py
    sys.path[:0] = [str(SOURCE), str(ROOT)]
    import_tests(chosen)
    counts: Counter[str] = Counter()
    for result in results(chosen, options.limit, options.jobs):
        print(result, flush=True)
        counts[result.verdict] += 1
    print(", ".join(f"{number} {verdict}" for verdict, number in counts.most_common()))
    return 0 if counts["caught"] == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
