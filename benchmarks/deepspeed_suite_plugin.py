"""A pytest plugin for `deepspeed_suite.py`: puts shardwise in the place of DeepSpeed, and notes what becomes of tests.

DeepSpeed starts the ranks of a test by a fork server, which imports torch for each of them, and ends pytest if one
hangs. Here ranks are forks of the process that has imported everything, and end a while after the first that fails.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch._dynamo  # once, and not by each rank, in its first optimizer: 5 s of processor time
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shardwise.integrations.deepspeed.distribution import register_distribution
from shardwise.integrations.deepspeed.facade import VERSION, install
from shardwise.integrations.deepspeed.names import RefusedImports

_GRACE_SECONDS = 5
"""For which ranks may go on after one has failed."""


_SIZES = {"deepspeed.runtime.swap_tensor": {"MIN_SWAPPABLE_BYTES": 2**20}}
"""Numbers of DeepSpeed's own parts by which tests choose the sizes of models."""


class RankError(Exception):
    """The first error of a rank: its type, message and traceback as text."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(f"{kind}: {message}\n{trace}")
        self.kind, self.message, self.trace = kind, message, trace


class InternalsError(Exception):
    """A test used something of DeepSpeed that shardwise's `deepspeed` does not have."""


class _StandIn(type):
    """A class in the place of an absent name, so that a file can be imported whose other tests do not use it."""

    def __call__(cls, *_: object, **__: object) -> Any:
        raise InternalsError(cls.__qualname__)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(f"{cls.__qualname__}.{name}")

    def __getitem__(cls, key: object) -> Any:
        return _stand_in(f"{cls.__qualname__}[{key!r}]")

    def __bool__(cls) -> bool:
        raise InternalsError(cls.__qualname__)

    def __instancecheck__(cls, instance: object) -> bool:
        return False


def _stand_in(name: str) -> Any:
    return _StandIn(name, (), {"__qualname__": name})


class _AbsentModules(MetaPathFinder, Loader):
    """Finds modules of DeepSpeed that are not there, whose names are all stand-ins."""

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith("deepspeed.") else None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(_SIZES.get(module.__name__, {}))
        _let_stand_in(module)


def _let_stand_in(module: ModuleType) -> None:
    def absent(name: str) -> Any:
        if name in ("__path__", "__file__", "__all__", "__wrapped__"):
            raise AttributeError(name)
        return _stand_in(f"{module.__name__}.{name}")

    module.__dict__["__getattr__"] = absent


def _install() -> None:
    """Let tests import DeepSpeed. What is absent is an error where a test uses it, not where its file imports it."""
    install()
    register_distribution(VERSION)
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, RefusedImports)]
    sys.meta_path.append(_AbsentModules())
    for name, module in list(sys.modules.items()):
        if name == "deepspeed" or name.startswith("deepspeed."):
            _let_stand_in(module)


def _let_ddp_run_on_cpus() -> None:
    """Tests compare with DDP, which they give the number of a GPU."""
    plain = DistributedDataParallel.__init__

    def made(self: DistributedDataParallel, module: torch.nn.Module, *args: Any, **options: Any) -> None:
        if all(param.device.type == "cpu" for param in module.parameters()):
            options |= {"device_ids": None, "output_device": None}
        plain(self, module, *args, **options)

    DistributedDataParallel.__init__ = made  # type: ignore[method-assign]


def _let_bf16_run_on_cpus() -> None:
    """Tests skip bf16 unless `torch_info` names versions of CUDA and NCCL that have it."""
    vars(sys.modules["deepspeed.git_version_info"])["torch_info"] |= {"cuda_version": "11.0", "nccl_version": "2.10"}


def _let_all_run_in_fp32() -> None:
    """Tests choose bf16 or fp16 by what the accelerator says that it supports."""
    kind = type(sys.modules["deepspeed.accelerator"].get_accelerator())
    kind.is_bf16_supported = kind.is_fp16_supported = lambda _: False


_install()
_let_bf16_run_on_cpus()
_let_ddp_run_on_cpus()
IN_FP32 = os.environ.get("DEEPSPEED_SUITE_FP32") == "1"
if IN_FP32:
    _let_all_run_in_fp32()


def pytest_collectstart(collector: pytest.Collector) -> None:
    """DeepSpeed's fixtures that run on several ranks are instances of classes, which pytest since 8.4 does not find."""
    if not isinstance(collector, pytest.Module):
        return
    try:
        module = collector.obj
    except BaseException:  # an error of the import is told where the file is collected
        return
    for name, kind in list(vars(module).items()):
        if isinstance(kind, type) and name != "DistributedFixture" and "is_dist_fixture" in dir(kind):
            setattr(module, name, _fixture(kind))
    if IN_FP32:
        _use_fp32(module)


def _fixture(kind: Any) -> Any:
    def run_on_ranks(request: pytest.FixtureRequest) -> None:
        kind()(request)

    return pytest.fixture(name=kind.__name__)(run_on_ranks)


def _use_fp32(module: Any) -> None:
    """Replace helpers of a test file that choose a dtype. Configs without `gradient_clipping` get 0: DeepSpeed clips by
    default, DDP beside it does not, and only the tolerances of bf16 hide that."""
    for name in ("preferred_dtype", "_config_dtype"):
        if hasattr(module, name):
            setattr(module, name, lambda *_: torch.float32)
    for name in ("get_config_dict", "_config"):
        if (made := getattr(module, name, None)) is not None:
            setattr(module, name, partial(_config_in_fp32, made))


def _config_in_fp32(made: Callable[..., dict[str, Any]], *args: Any, **options: Any) -> dict[str, Any]:
    config = {"gradient_clipping": 0, **made(*args, **options)}
    return {name: value for name, value in config.items() if name not in ("bf16", "fp16")}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    record = Path(os.environ["DEEPSPEED_SUITE_RESULTS"])
    known = {json.loads(line)["test"] for line in record.read_text().splitlines()}
    drawn = _drawn([item.nodeid for item in items], int(os.environ["DEEPSPEED_SUITE_EACH_TEST"]))
    with record.open("a") as file:
        for item in items:
            if item.nodeid not in drawn | known:
                file.write(json.dumps({"test": item.nodeid, "outcome": "not drawn"}) + "\n")
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in drawn - known])
    items[:] = [item for item in items if item.nodeid in drawn - known]
    common = sys.modules.get("unit.common")
    if common is not None:
        common.DistributedExec._launch_procs = _launch
        setattr(common, "reduce_boolean_flags", _on_all_ranks)  # noqa: B010  # a module without types


def _on_all_ranks(flag: bool, op: Callable[[list[bool]], bool] = all) -> bool:
    """In the place of a helper of DeepSpeed's tests that asks for the first GPU."""
    if not dist.is_initialized():
        return flag
    flags: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(flags, flag)
    return op(flags)


def _drawn(tests: list[str], count: int) -> set[str]:
    """`count` parametrisations of each test, or all if `count` is 0: for a larger count the same ones, and more."""
    shuffled: dict[str, list[str]] = {}
    for test in sorted(tests, key=lambda test: hashlib.sha256(test.encode()).digest()):
        shuffled.setdefault(test.partition("[")[0], []).append(test)
    return {test for ones in shuffled.values() for test in (ones[:count] if count else ones)}


def _launch(test: Any, num_procs: int, init_method: str) -> None:
    """Run `test` on ranks that are forks of this process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in range(num_procs):
        mine, theirs = context.Pipe()
        process = context.Process(target=_rank, args=(test, rank, num_procs, port, init_method, theirs), daemon=False)
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    try:
        skips = _outcomes(pipes, time.monotonic() + float(os.environ["DEEPSPEED_SUITE_SECONDS"]))
    finally:
        for process in processes:
            process.kill()
            process.join()
    if any(skips):
        pytest.skip(next(filter(None, skips)))


def _outcomes(pipes: list[Connection], deadline: float) -> list[str]:
    """Why each rank skips the test, if it does. Raises `RankError` if one fails, or not all are done in time."""
    open_ones: list[Any] = list(pipes)
    skips: list[str] = []
    first_error: RankError | None = None
    while open_ones:
        ready: list[Any] = wait(open_ones, max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            open_ones.remove(pipe)
            try:
                answer = pipe.recv()
            except EOFError:
                answer = ("Crash", "A rank ended without a word.", "")
            if isinstance(answer, tuple):
                if first_error is None:
                    first_error, deadline = RankError(*answer), time.monotonic() + _GRACE_SECONDS
            else:
                skips.append(answer)
    if first_error is not None:
        raise first_error
    if open_ones:
        raise RankError("Hang", "Ranks were not done in time.", "")
    return skips


def _rank(test: Any, rank: int, num_procs: int, port: int, init_method: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    try:
        pipe.send(test._dist_run(rank, num_procs, port, init_method))
    except BaseException as error:
        pipe.send((_type(error), str(error), "".join(traceback.format_exception(error))[-4000:]))
    finally:
        time.sleep(3600)  # until the process is killed: others may still need this rank's connections


def _type(error: BaseException) -> str:
    return f"{type(error).__module__}.{type(error).__qualname__}"


class _Record:
    """Writes a line for each test that has run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._errors: dict[str, dict[str, str]] = {}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        outcome = yield
        report = outcome.get_result()
        error = None if call.excinfo is None else call.excinfo.value
        if report.when == "call" or report.outcome != "passed":
            self._write(item.nodeid, report.outcome, error)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome == "failed":
            trace = str(report.longrepr)
            last = [line[2:].strip() for line in trace.splitlines() if line.startswith("E  ")]
            kind, _, message = (last[-1] if last else "Error: " + trace[-200:]).partition(": ")
            self._add({"test": report.nodeid, "outcome": "failed", "type": kind, "message": message, "trace": trace})
        elif report.outcome == "skipped":
            self._add({"test": report.nodeid, "outcome": "skipped"})

    def _write(self, test: str, outcome: str, error: BaseException | None) -> None:
        line: dict[str, Any] = {"test": test, "outcome": outcome, **({"precision": "fp32"} if IN_FP32 else {})}
        if outcome == "skipped" and error is not None:
            line["message"] = str(error)
        if outcome == "failed" and error is not None:
            if isinstance(error, RankError):
                line |= {"type": error.kind, "message": error.message, "trace": error.trace}
            else:
                trace = "".join(traceback.format_exception(error))[-4000:]
                line |= {"type": _type(error), "message": str(error), "trace": trace}
        self._add(line)

    def _add(self, line: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Record(Path(os.environ["DEEPSPEED_SUITE_RESULTS"])))
