"""Settings that every test shares."""

from __future__ import annotations

import atexit
import gc
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

if os.environ.get("DEVICE", "cpu") == "cpu":  # ranks take the GPUs that they see, and these tests are of CPUs
    os.environ.update(dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"), ""))

import numpy as np
import pytest
import torch
from hypothesis import register_random, settings
from hypothesis.internal.conjecture import providers

from tests import drawing, warm
from tests.covering import Chooser
from tests.thorough import SOAK, divided, drawn, keep_wanted

torch.set_num_threads(1)
# Threads as ranks make and drop thousands of small objects: at Python's own 700, a twentieth of all tests' time was the
# search for garbage among them. Tests of what is left behind collect themselves.
gc.set_threshold(10_000)
# A machine that does other things must not fail a test. Examples are the same each time, except in `make soak`.
settings.register_profile("busy", deadline=None, derandomize=not SOAK, max_examples=drawn(25, 100))
settings.load_profile("busy")
if not SOAK:
    # Some of what hypothesis draws are constants of all local modules that are imported by then, so that examples
    # depended on which files were collected or run before. Reading these from 800 files also took each worker seconds.
    providers.is_local_module_file = lambda _: False
if not torch.accelerator.is_available():
    # Torch notes for devices that may come with what to seed them, and three times the whole stack that says so: half a
    # millisecond for each call of torch.manual_seed, and each test makes one.
    for devices in (torch.cuda, torch.xpu, torch.mtia):
        vars(devices)["manual_seed_all"] = lambda _: None

UNTIL = float(os.environ.get("TESTS_UNTIL", "inf"))
"""When the last test may begin, in seconds since 1970: `tests/gate.py` gives each of its parts a share of its time."""
NO_TIME = "no time was left for it"


IN_ORDER = pytest.StashKey[dict[Path, int]]()
CHOOSERS = pytest.StashKey[dict[Path, Chooser]]()


def pytest_configure(config: pytest.Config) -> None:
    drawing.guard()
    if not hasattr(config, "workerinput"):
        _leave_nothing_behind()
    _forget_measurements()
    _begin_elsewhere(config)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    """Let workers be forks of a process that has imported what each of them would. Tests of other libraries say
    themselves what is imported first."""
    if any(name.startswith("tests/extras") for name in config.args):
        return
    python = warm.python_of_workers()
    for spec in specs:
        spec.python = python


def _leave_nothing_behind() -> None:
    """One folder holds what this run puts into temporary folders: its workers', its jobs' and its killed ranks' too.
    pytest's own stay where they are, for whoever looks into a failure."""
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix="shardwise-tests-")
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


def _forget_measurements() -> None:
    """Plans that are searched for, and predictions in runs, use what this machine was measured to give. No test may."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    os.environ.setdefault("HF_HOME", f"{cache}/huggingface")
    os.environ.setdefault("MPLCONFIGDIR", f"{cache}/matplotlib")  # its list of fonts takes seconds to make
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="cache-")


def _begin_elsewhere(config: pytest.Config) -> None:
    """Let each worker begin to import at another file. In a fresh checkout pytest rewrites the asserts of every file,
    which takes as long as all other imports; the others find what one of them has rewritten."""
    worker = getattr(config, "workerinput", None)
    if worker is None or _names_tests(config):
        return
    files = [path for name in config.args for path in (sorted(Path(name).rglob("test_*.py")) or [Path(name)])]
    ignored = [Path(name).absolute() for name in config.getoption("ignore") or ()]  # pytest takes named files anyway
    files = [path for path in files if not any(path.absolute().is_relative_to(one) for one in ignored)]
    start = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    config.args = [str(path) for path in (*files[start:], *files[:start])]
    config.stash[IN_ORDER] = {path.absolute(): place for place, path in enumerate(files)}


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None, object, object]:
    """Leave to other targets the cases that are theirs, unless tests were named one by one."""
    made = yield
    if not _names_tests(metafunc.config):
        keep_wanted(metafunc, metafunc.config.stash.setdefault(CHOOSERS, {}))
    return made


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The same for whole tests, such as those that `make soak` runs."""
    if _names_tests(config):
        return
    if (order := config.stash.get(IN_ORDER, None)) is not None:
        items.sort(key=lambda item: order[item.path])
    items[:], later = divided(items)
    config.hook.pytest_deselected(items=later)


class TorchRandom:
    """torch's random numbers, for hypothesis: each example begins with the same, as with `random`'s and numpy's."""

    seed = staticmethod(torch.default_generator.manual_seed)
    getstate = staticmethod(torch.default_generator.get_state)
    setstate = staticmethod(torch.default_generator.set_state)


TORCH = TorchRandom()  # hypothesis refers to it weakly
register_random(TORCH)


def _begin_random_numbers() -> None:
    torch.manual_seed(0)  # of devices too
    random.seed(0)
    np.random.seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> None:
    """A fixture of several tests draws the same whichever of them asks for it first, and after which others."""
    if fixturedef.scope != "function":
        _begin_random_numbers()


@pytest.fixture(autouse=True)
def _random_numbers_begin_anew() -> None:
    """What a test draws without a seed of its own is the same in the suite, in another order of it, and alone. Models
    that were drawn from what the test before had left now and then had a weight between two 8-bit codes, where the
    order of a sum decides which it becomes; nobody could draw that model again."""
    _begin_random_numbers()


@pytest.fixture(autouse=True)
def _the_default_dtype_is_left_as_it_was() -> Iterator[None]:
    """Threads that replace and restore it beside each other may leave it replaced: the next tests would compute so."""
    yield
    left = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    assert left == torch.float32, "set while another thread had replaced it?"


def _names_tests(config: pytest.Config) -> bool:
    return any("::" in argument for argument in config.args)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: the search for garbage need not go through it again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """So does what the tests of a file have imported: a full search took half a second of all that others had, and a
    sixth of the time of tests with ranks was such searches."""
    try:
        return (yield)
    finally:
        if nextitem is not None and nextitem.path != item.path:
            gc.collect()
            gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if time.time() > UNTIL:
        pytest.skip(NO_TIME)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if NO_TIME in str(report.longrepr)]
    for path, number in Counter(report.nodeid.partition("::")[0] for report in skipped).items():
        terminalreporter.line(f"Left out, as there was no time: {number} of {path}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """`AGAIN=1` repeats what failed in a whole run. After one that broke off, with other tests not run at all, there is
    nothing to repeat: continuous integration would take it for passed."""
    is_whole = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    cache = getattr(session.config, "cache", None)  # there is none with `-p no:cacheprovider`
    if not is_whole and session.config.pluginmanager.hasplugin("dsession") and cache is not None:
        cache.set("cache/lastfailed", {})
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and "TESTS_UNTIL" in os.environ:
        session.exitstatus = pytest.ExitCode.OK  # `make test` has run all that these files have
