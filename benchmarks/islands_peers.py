"""The same training by others: torch's DDP, its PowerSGD hook, and torchft's DiLoCo. One rank of it.

DeepSpeed is not among them: its 1-bit optimizers are gone (0.19.8 has no `deepspeed.runtime.fp16.onebit`).

[Note: torchft between hosts] A host is a replica group, whose ranks average gradients by DDP in each step. Rank 0 has
the lighthouse, each host's first rank a store and a manager, all at addresses of their own, as hosts have no names that
others could look up. Losses of hosts are not tried, so nobody recovers from another one.

[Note: one bucket] The hook starts messages where earlier ones end, on gloo's threads. With several buckets ranks do so
in different orders, and gloo takes one message for another and ends the process (seen with torch 2.13 on four ranks).
"""

from __future__ import annotations

import datetime
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in __all__

from benchmarks.islands_names import PEERS, POWER_RANK, TORCHFT, WHOLE_STEPS
from benchmarks.model import GPT
from benchmarks.namespaces import NETWORK

_LIGHTHOUSE_PORT, _STORE_PORT = 29710, 29711
_ALL_MB = 1024
"""See [Note: one bucket]."""
_TIMEOUT = datetime.timedelta(seconds=600)


class Peer:
    """Trains `model` and `optimizer`. All ranks make it, and call every method."""

    def __init__(self, name: str, model: GPT, optimizer: torch.optim.Optimizer, local_size: int, every: int) -> None:
        assert name in PEERS
        self._model, self._optimizer = model, optimizer
        self._stack = ExitStack()
        inside = _groups_of_hosts(local_size) if name == TORCHFT else None
        self._replica = nn.parallel.DistributedDataParallel(
            model,
            process_group=inside,
            bucket_cap_mb=_ALL_MB if name == "torch-powersgd" else None,
            gradient_as_bucket_view=True,
            static_graph=True,
        )
        if name == TORCHFT:
            _join_islands(model, optimizer, local_size, every, self._stack)
        elif name == "torch-powersgd":
            from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

            settings = {"matrix_approximation_rank": POWER_RANK, "start_powerSGD_iter": WHOLE_STEPS}
            state = powerSGD_hook.PowerSGDState(None, **settings)  # type: ignore[arg-type]  # of any type
            self._replica.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def step(self, tokens: Tensor) -> None:
        self._replica(tokens).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """That of the model; of all islands where an outer step has just been."""
        return {name: tensor.detach().clone() for name, tensor in self._model.state_dict().items()}

    def close(self) -> None:
        self._stack.close()


def _groups_of_hosts(local_size: int) -> dist.ProcessGroup:
    """That of this rank's host."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(list(range(first, first + local_size))) for first in range(0, size, local_size)]
    own: dist.ProcessGroup = groups[rank // local_size]
    return own


def _join_islands(
    model: nn.Module, optimizer: torch.optim.Optimizer, local_size: int, every: int, stack: ExitStack
) -> None:
    """See [Note: torchft between hosts]. The outer optimizer takes plain averages, as that of our islands does."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    host, local = divmod(dist.get_rank(), local_size)
    address, num_hosts = f"{NETWORK}.{host + 1}", dist.get_world_size() // local_size
    if dist.get_rank() == 0:
        lighthouse = LighthouseServer(bind=f"[::]:{_LIGHTHOUSE_PORT}", min_replicas=num_hosts)
        stack.callback(lighthouse.shutdown)
    store = TCPStore(address, _STORE_PORT, is_master=True, wait_for_workers=False) if local == 0 else None
    stack.callback(lambda: store)  # it serves until everything that asks it has ended
    dist.barrier()
    manager = Manager(
        ProcessGroupGloo(timeout=_TIMEOUT),
        load_state_dict=lambda _: None,
        state_dict=dict[str, Any],
        min_replica_size=num_hosts,
        use_async_quorum=False,
        timeout=_TIMEOUT,
        quorum_timeout=_TIMEOUT,
        rank=local,
        world_size=local_size,
        store_addr=address,
        store_port=_STORE_PORT,
        lighthouse_addr=f"http://{NETWORK}.1:{_LIGHTHOUSE_PORT}",
        replica_id=f"island-{host}",
        hostname=address,
        init_sync=False,
    )
    stack.callback(manager.shutdown)
    stack.callback(dist.barrier)  # before any manager ends
    outer = torch.optim.SGD(model.parameters(), lr=1.0)
    stack.enter_context(DiLoCo(manager, [model], optimizer, outer, sync_every=every, use_bucketization=True))
