"""The entry point of a rank: `python -m shardwise.launch.worker [-m] script args...`.

Runs the script as `python script args...` would, and records errors for the launcher. Imports no torch:
the script does, but for elastic jobs, which have it before they join.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import importlib
import io
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType

from shardwise.errors import FaultError, TurnedAwayError
from shardwise.launch.orphans import follow_launchers
from shardwise.launch.outcome import ENDED
from shardwise.launch.run_script import run_script, scripts_part
from shardwise.launch.topology import parse_cores
from shardwise.system.fast_exit import skip_last_collection

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run the script named on the command line; does not return after a failure."""
    skip_last_collection()
    _die_with_launcher()
    follow_launchers(os.environ)
    _bind_to_cores()
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if "SHARDWISE_MEMBER" in os.environ and error_file:
        atexit.register(_record_end, error_file)  # registered early, so it is done late
    _write_whole_lines()
    _record_crashes(error_file)
    if error_file:
        sys.excepthook = _print_no_traceback
    try:
        _import_before_joining()
        run_script(sys.argv[1:])
    except KeyboardInterrupt as error:
        _record(error_file, error, "", wanted=128 + signal.SIGINT)
        raise  # it was asked to end; the process ends by SIGINT
    except SystemExit as error:
        code = error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
        if code:
            _record(error_file, error, "", wanted=code)
            if "SHARDWISE_MEMBER" in os.environ:
                sys.last_value = error  # as for other exceptions: the others learn that this rank failed
        raise
    except BaseException as error:
        if isinstance(error, TurnedAwayError) and error.has_asked:
            sys.exit(0)  # this rank was asked to leave, and the others continue
        error.__traceback__ = scripts_part(error.__traceback__)
        if not _record(error_file, error, "".join(traceback.format_exception(error))):
            sys.excepthook = sys.__excepthook__
        raise


def _import_before_joining() -> None:
    """In an elastic job, import what the first optimizer needs before `World.join`: it takes seconds, and from then on
    the other ranks wait for this one. If they are training already, a whole step is warmed up."""
    if "SHARDWISE_MEMBER" in os.environ:
        importlib.import_module("torch._dynamo")
        importlib.import_module("shardwise.elastic.session")
        if int(os.environ.get("SHARDWISE_FIRST_ANNOUNCEMENT", "0")):  # others are training already
            importlib.import_module("shardwise.launch.warm_up").warm_up()


def _print_no_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The `sys.excepthook` under which a script starts: the launcher reports errors once, instead of each rank.

    A hook that the script installs works as usual; torch's own wraps this one.
    """


def _die_with_launcher() -> None:
    """Make the kernel kill this rank when the launcher dies, however it dies."""
    launcher = os.environ.pop("SHARDWISE_LAUNCHER_PID", None)
    if launcher is None or sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(launcher):
        os._exit(128 + signal.SIGKILL)  # it died before we could ask


def _bind_to_cores() -> None:
    """Bind this process to its cores, before it has other threads, which inherit the binding."""
    listed = os.environ.pop("SHARDWISE_CORES", "")
    if listed:
        os.sched_setaffinity(0, parse_cores(listed))


def _write_whole_lines() -> None:
    """Write each line at once and in one piece: unbuffered, `print` writes its newline separately."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _record_crashes(error_file: str) -> None:
    """On a crash in native code, write the Python stack next to the error file."""
    if error_file:
        faulthandler.enable(open(f"{error_file}.fault", "w"), all_threads=False)  # noqa: SIM115 stays open


def _record(error_file: str, error: BaseException, text: str, wanted: int | None = None) -> bool:
    """Write the exception to the error file, in torch elastic's format; False if that is impossible.

    Torch elastic's timestamp has whole seconds, and peers fail within milliseconds: `time` is exact. `wanted` is the
    exit code that the script chose; without one this is a failure, which may name the ranks at fault.
    """
    if not error_file:
        return False
    now = time.time()
    summary = "".join(traceback.format_exception_only(error)).strip()
    at_fault = list(error.ranks) if isinstance(error, FaultError) else []
    details = {"py_callstack": text, "timestamp": str(int(now)), "time": now, "wanted": wanted, "at_fault": at_fault}
    if "shardwise.system.data_ranks" in sys.modules:  # else no loader has provided a batch
        details["batch"] = sys.modules["shardwise.system.data_ranks"].HANDED_OUT.text()
    draft = Path(f"{error_file}.draft")
    try:
        draft.write_text(json.dumps({"message": {"message": summary, "extraInfo": details}}))
        draft.replace(error_file)
    except OSError:
        return False
    return True


def _record_end(error_file: str) -> None:
    """Tell a launcher that is not this process's parent that it has not been killed."""
    with contextlib.suppress(OSError):
        Path(f"{error_file}{ENDED}").touch()


if __name__ == "__main__":
    main()
