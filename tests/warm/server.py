"""A process that has imported torch and shardwise, and is forked for every process that a test starts.

An import of torch takes two seconds of a core, and the tests start hundreds of processes. `warm.python()` takes the
command line of a Python process, and has it run here: a fork of this server gets its arguments, environment, folder and
standard streams, and runs the module or script as a new interpreter would, down to the exit handlers. What it does
not get is what a process reads when it starts: settings of glibc and OpenMP, PYTHONHASHSEED, ignored signals.

pytest's workers are such forks too, of a server that has imported more: what most of them would import each. The one of
the tests' processes must not have that, because these look at what a process imports and takes.

    server.py SOCKET PYTHON [SOCKET_FOR_WORKERS]
"""

from __future__ import annotations

import array
import atexit
import contextlib
import gc
import importlib
import marshal
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import types
from pathlib import Path
from typing import Any, NoReturn

FOR_RANKS = "WARM_RANKS"
NUM_STREAMS = 3
PLAIN_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)


def import_all() -> None:
    """What a process of the tests comes to import. Nothing of this may start a thread."""
    import torch
    import torch._dynamo  # a first backward under hooks imports it
    import torch.distributed.elastic.agent.server.api

    import shardwise
    import shardwise.cli.launch
    import shardwise.cli.main
    import shardwise.data
    import shardwise.launch.job_report
    import shardwise.launch.torch_agent
    import shardwise.observe

    for name in shardwise.__all__:
        getattr(shardwise, name)
    torch.set_num_threads(1)


def import_for_workers() -> None:
    """What tests import within a worker. No plugin of pytest's: it rewrites their asserts when it imports them."""
    models = ("bert", "gpt2", "llama", "mixtral")
    for name in ("torch.distributed.checkpoint", *(f"transformers.models.{one}.modeling_{one}" for one in models)):
        importlib.import_module(name)


def serve(path: str) -> dict[str, Any]:
    """Fork for each request. Returns in a fork, with the request that it is to fulfil."""
    owner = os.getppid()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"{path}.draft")
    listener.listen(64)
    listener.settimeout(1.0)
    os.rename(f"{path}.draft", path)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks what became of them
    gc.collect()
    gc.freeze()
    while os.getppid() == owner:
        try:
            client, _ = listener.accept()
        except TimeoutError:
            continue
        if os.fork() == 0:
            listener.close()
            return forked_for(client)
        client.close()
    os._exit(0)


def forked_for(client: socket.socket) -> dict[str, Any]:
    """Fork once more: here whoever runs, there who tells the client how that ended, and ends it with the client."""
    said, streams = received(client)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    is_known, begin = os.pipe()
    pid = os.fork()
    if pid:
        for number in (*range(NUM_STREAMS), *streams):
            os.close(number)
        client.sendall(pid.to_bytes(8, "little"))
        os.write(begin, b"!")
        watch(client, pid)
        os._exit(0)
    client.close()
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.close(begin)
    os.read(is_known, 1)
    os.close(is_known)
    return said


def received(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    client.settimeout(None)
    streams = array.array("i")
    head, rights, _, _ = client.recvmsg(8, socket.CMSG_SPACE(NUM_STREAMS * streams.itemsize))
    for _, _, data in rights:
        streams.frombytes(data)
    size, content = int.from_bytes(head, "little"), b""
    while len(content) < size:
        content += client.recv(size - len(content))
    said: dict[str, Any] = marshal.loads(content)
    return said, list(streams)


def watch(client: socket.socket, pid: int) -> None:
    """Tell the client how `pid` ended. A client that goes first was killed in the place of what it stands for."""
    process = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.register(client, select.POLLIN)
    if (process, select.POLLIN) not in poll.poll():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        client.sendall(status.to_bytes(8, "little"))


def run(said: dict[str, Any], python: str) -> None:
    """As `python ARGUMENTS` would."""
    for number in PLAIN_SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(said["environment"])
    os.chdir(said["folder"])
    tempfile.tempdir = None  # TMPDIR may be another
    arguments: list[str] = said["arguments"]
    sys.stdin, sys.stdout, sys.stderr = (
        open(0, closefd=False),  # noqa: SIM115  # they stay open
        open(1, "w", closefd=False),  # noqa: SIM115
        open(2, "w", closefd=False, buffering=1, errors="backslashreplace"),  # noqa: SIM115
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    if os.environ.pop(FOR_RANKS, None):
        sys.executable = python  # what it starts are forks too
    if arguments[0] == "-u":
        arguments = arguments[1:]  # whoever says so flushes what counts
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path[0] = ""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(arguments[1], vars(main))
    elif arguments[0] == "-m":
        sys.argv = ["-m", *arguments[2:]]
        sys.path[0] = os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")


def end(error: BaseException | None) -> NoReturn:
    """As an interpreter does, but for tearing down what it has imported, which takes a second with torch."""
    status = 0
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    elif error is not None:
        status = 1
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)


if __name__ == "__main__":
    import_all()
    for_ranks, python, *for_workers = sys.argv[1:]
    if for_workers and os.fork() == 0:
        import_for_workers()
        request = serve(*for_workers)
    else:
        request = serve(for_ranks)
    try:
        run(request, python)
    except BaseException as error:
        end(error)
    end(None)
