"""`torch.distributed` over MPI: what runs under `mpirun -np 4 python train.py`, without a PyTorch built for it.

    import shardwise.integrations.mpi
    torch.distributed.init_process_group("mpi4py")

The import registers the backend `mpi4py` for tensors of the host. Where an MPI has started the process and nobody has
set RANK, it also initializes MPI, lets rank 0 find an address for the store that torch wants, and sets RANK,
WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as `torchrun` would: all ranks import it. After
it `sw.World.join()` goes by MPI too.
"""

from __future__ import annotations

from shardwise.comm.mpi.backend import BACKEND, register
from shardwise.comm.mpi.environment import as_torchrun_would

__all__ = ["BACKEND"]

register()
as_torchrun_would()
