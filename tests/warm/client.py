"""Stands for a Python process that runs as a fork of `server.py`: same arguments, streams, signals and exit status.

`python -S -E client.py SOCKET ARGUMENTS`. Only what is built in is imported: this is all that starting a process costs.
"""

import _signal
import _socket
import marshal
import os
import sys


def main(path, arguments):
    environment = dict(os.environ)
    launcher = environment.pop("SHARDWISE_LAUNCHER_PID", None)  # who would find another parent than it expects
    if launcher is not None:
        end_with(int(launcher))
    content = marshal.dumps({"arguments": arguments, "environment": environment, "folder": os.getcwd()})
    server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    server.connect(path)
    streams = b"".join(number.to_bytes(4, sys.byteorder) for number in range(3))
    server.sendmsg([len(content).to_bytes(8, "little")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
    server.sendall(content)
    pid = told(server)
    for number in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP):
        _signal.signal(number, lambda number, _: pass_on(number, pid))
    status = os.waitstatus_to_exitcode(told(server))
    if status < 0:
        if status in (-_signal.SIGINT, -_signal.SIGTERM, -_signal.SIGHUP):
            _signal.signal(-status, _signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def pass_on(number, pid):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it has ended by itself, which the server is about to say


def told(server):
    said = server.recv(8)
    if len(said) < 8:
        os._exit(125)  # the server is gone
    return int.from_bytes(said, "little")


def end_with(launcher):
    """As `shardwise.launch.worker` does it."""
    import ctypes

    ctypes.CDLL(None).prctl(1, _signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:
        os._exit(137)


main(sys.argv[1], sys.argv[2:])
