"""`shardwise launch --where mpi` with the `mpirun` of Open MPI and of MPICH."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import test_mpi

import shardwise
from tests.cluster.training import TRAIN

pytestmark = test_mpi.pytestmark
OF_MPI = {"openmpi": "--allow-run-as-root --oversubscribe --mca btl self,sm,tcp --mca btl_tcp_if_include lo"}
IN_SIGHT = """
    import pathlib
    assert len(os.environ["SHARDWISE_TOKEN"]) == 64
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            shown = path.read_text(errors="replace")
        except OSError:
            continue
        assert os.environ["SHARDWISE_TOKEN"] not in shown and "s3cr3t" not in shown, shown
"""
RAISES = """
    import os, sys
    sys.exit(3 if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1" else 0)
"""
WAITS = """
    import os, pathlib, time
    from shardwise.launch import StopRequest
    with StopRequest() as stop:
        os.write(1, b"ready\\n")  # in one piece: MPICH passes on what comes, of both ranks
        while not stop.requested:
            time.sleep(0.01)
        time.sleep(1)
        pathlib.Path(f"saved-{os.getpid()}").write_text(stop.signal.name)
"""


def begin(which: str, folder: Path, script: str, *options: str) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(textwrap.dedent(script))
    binaries = test_mpi.VENVS[which] / "bin"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "OMPI", "RANK"))}
    paths = [str(Path(shardwise.__file__).parents[1]), *filter(None, sys.path)]
    given = {"PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(paths)}
    launch = [sys.executable, "-m", "shardwise", "launch", "--where", "mpi", "--nproc", "2", *options]
    launch += ["--python", str(binaries / "python"), f"--launcher-args={OF_MPI.get(which, '-iface lo')}", "train.py"]
    pipe = subprocess.PIPE
    environment = inherited | given | {"OMP_NUM_THREADS": "1", "TOKEN": "s3cr3t"}
    return subprocess.Popen(launch, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=test_mpi.SECONDS)
    finally:
        process.kill()
    return process.returncode, out, err


@pytest.mark.parametrize("which", test_mpi.VENVS)
def test_ranks_train_like_one_process(which: str, tmp_path: Path) -> None:
    """They meet by MPI; the token of the job, and what is forwarded, is on no command line."""
    script = TRAIN.replace("    world.close()", f"{IN_SIGHT}    world.close()")
    status, out, err = finished(begin(which, tmp_path, script, "-x", "TOKEN", "--bind", "cores"))
    assert status == 0, err
    host = os.uname().nodename
    assert sorted(out.splitlines()) == [f"like the plain model on {host} as rank {rank}" for rank in range(2)]


@pytest.mark.parametrize("which", test_mpi.VENVS)
def test_how_it_ends(which: str, tmp_path: Path) -> None:
    """A status comes through, and so does a signal, after which ranks may save."""
    assert finished(begin(which, tmp_path, RAISES))[0] == 3
    process = begin(which, tmp_path, WAITS)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    process.send_signal(signal.SIGTERM)
    status, _, err = finished(process)
    saved = [path.read_text() for path in tmp_path.glob("saved-*")]  # MPICH may lose what a rank prints as it ends
    assert (status, saved) == (0, ["SIGTERM"] * 2), err
