"""`torch.distributed` over MPI, for `mpirun -np 4 python train.py`, with a PyTorch that was built without MPI.

    import shardwise.integrations.mpi
    torch.distributed.init_process_group("mpi4py")

The import registers the backend `mpi4py` for CPU tensors. If MPI has started the process and RANK is not set, it also
initializes MPI, lets rank 0 choose an address for torch's store, and sets RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT like `torchrun`. So all ranks must import it. `sw.World.join()` then uses
MPI too.
"""

from __future__ import annotations

from shardwise.comm.transport.mpi import BACKEND
from shardwise.comm.transport.mpi.backend import register
from shardwise.comm.transport.mpi.rank_variables import as_torchrun_would

__all__ = ["BACKEND"]

register()
as_torchrun_would()
