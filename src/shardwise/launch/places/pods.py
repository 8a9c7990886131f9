"""An elastic job whose hosts call the launcher: pods of Kubernetes, or whatever else starts `launch/hosts/pod.py`."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.errors import ConfigError
from shardwise.launch.autoscale import Sizes, describe_policy
from shardwise.launch.places.ssh import SshPlan

PORT = 29500
"""Where hosts call; ranks meet at the next one."""


@dataclass(frozen=True)
class PodsPlan(SshPlan):
    """What would run in pods. `shares` are those that are waited for; which pods they are is known when they call."""

    pods_together: int = 1
    """With `--autoscale`: so many pods come and go together."""

    @property
    def unit(self) -> int:
        """With `--autoscale`, the job has a multiple of so many ranks."""
        return (self.slots_per_host or 1) * self.pods_together

    def text(self) -> str:
        """What a dry run prints."""
        elastic, per_pod = self.job.elastic, self.slots_per_host
        assert elastic is not None
        lines = [f"{elastic.least} to {elastic.most} ranks, {per_pod} in each pod that connects"]
        lines.append(f"pods connect to {self.settings.address}, port {self.port}; the store is at port {self.port + 1}")
        if elastic.autoscale is not None:
            sizes = Sizes(elastic.least, elastic.most, self.unit)
            lines.append(describe_policy(elastic.autoscale, sizes, self.num_ranks, "the API server"))
        lines.append(f"the job starts with {len(self.shares)} pods, or with fewer after a minute")
        return "\n".join(lines)

    def describe_need(self) -> str:
        """`8 slots in 2 pods, of which the job needs 4`."""
        assert self.job.elastic is not None
        pods = f"{len(self.shares)} pod{'' if len(self.shares) == 1 else 's'}"
        return f"{self.num_ranks} slots in {pods}, of which the job needs {self.job.elastic.least}"

    @property
    def port(self) -> int:
        """Where pods call."""
        return self.job.port or PORT

    def check(self) -> None:
        super().check()
        if self.port > 65534:
            raise ConfigError(f"--port is {self.port}: the store uses the next port, so give 65534 or less.")
