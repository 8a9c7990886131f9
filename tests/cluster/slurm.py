"""Slurm on hosts that are namespaces of this machine: one slurmctld, and a slurmd on each host."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.namespaces import UNTIL_WE_END, Cluster, cluster, obstacle
from tests.free_port import free_port
from tests.patience import wait_until

# A job that is put into the queue again begins when its old credentials are over.
_CONFIG = """\
ClusterName=swtest
SlurmctldHost={name}({network}.254)
SlurmUser=root
SlurmctldPort={port}
SlurmdPort=16818
SlurmdParameters=config_overrides
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=15
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=5
SchedulerParameters=sched_interval=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def slurm_obstacle() -> str:
    """Why Slurm cannot run here; `""` if it can."""
    for tool in ("slurmctld", "slurmd", "munged", "srun", "sbatch"):
        if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin") is None:
            return f"needs {tool} (make test-cluster installs it)"
    return obstacle()


@contextmanager
def slurm_on_two_nodes(folder: Path) -> Iterator[Slurm]:
    """Slurm on `n1` and `n2`, which have no sshd, with all its files in `folder`."""
    for name in ("keys", "slurm"):
        (folder / name).mkdir()
    with cluster(folder / "keys") as hosts:
        for name in ("n1", "n2"):
            hosts.add(name, has_sshd=False)
        made = Slurm(hosts, ["n1", "n2"], folder / "slurm")
        try:
            made.open()
            yield made
        finally:
            made.close()


class Slurm:
    """Set `variables` to speak with it."""

    def __init__(self, hosts: Cluster, names: list[str], folder: Path) -> None:
        self.folder, self.hosts, self._names = folder, hosts, names
        self._processes: list[subprocess.Popen[bytes]] = []
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf")}

    def open(self) -> None:
        """Start all daemons, and wait until all nodes are idle."""
        folder, addresses = self.folder, self.hosts.addresses
        config, key = folder / "slurm.conf", folder / "munge.key"
        folder.chmod(0o755)
        for name in ("state", *(f"spool-{name}" for name in self._names)):
            (folder / name).mkdir()
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        known = {"localhost": "127.0.0.1", **{name: addresses[name] for name in self._names}}
        (folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in known.items()))
        nodes = "\n".join(f"NodeName={name} NodeAddr={addresses[name]} CPUs=2 State=UNKNOWN" for name in self._names)
        config.write_text(
            _CONFIG.format(
                name=os.uname().nodename, network=self.hosts.network, port=free_port(), folder=folder, nodes=nodes
            )
        )
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        munge = [f"--socket={folder}/munge.socket", f"--key-file={key}", f"--pid-file={folder}/munge.pid"]
        files = [f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"]
        self._start("/usr/sbin/munged", "--foreground", "--force", *munge, *files)
        self._start("/usr/sbin/slurmctld", "-D", "-c", "-f", str(config))
        for name in self._names:
            script = f"mount --bind {folder}/hosts /etc/hosts\n/usr/sbin/slurmd -D -N {name} -f {config}"
            with (folder / f"started-{name}.log").open("wb") as log:
                self._processes.append(self.hosts.start(name, script, log, **self.variables))
        self._await(len(self._names))

    def command(self, *words: str) -> str:
        done = subprocess.run(
            words, capture_output=True, text=True, env=os.environ | self.variables, timeout=60, check=False
        )
        return done.stdout + done.stderr

    def close(self) -> None:
        """End all jobs and daemons."""
        for process in reversed(self._processes):  # nodes first, with all that runs there; munged last
            process.kill()
            process.wait()

    def _start(self, *command: str) -> None:
        with (self.folder / f"started-{len(self._processes)}.log").open("wb") as log:
            environment = os.environ | self.variables
            whole = [*UNTIL_WE_END, *command]
            self._processes.append(subprocess.Popen(whole, env=environment, stdout=log, stderr=log))

    def _await(self, num_nodes: int) -> None:
        def states() -> list[str]:
            return self.command("sinfo", "--noheader", "--Node", "--format=%t").split()

        def told() -> str:
            logs = (path.read_text(errors="replace")[-1500:] for path in self.folder.glob("*.log"))
            return "\n".join([" ".join(states()), *logs])

        wait_until(lambda: states() == ["idle"] * num_nodes, told)
