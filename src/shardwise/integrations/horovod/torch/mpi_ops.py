"""Collectives on torch tensors, with their gradients.

Collectives are matched by `name`; ranks may issue named collectives in any order. `..._async` returns a handle for
`poll` and `synchronize`; a trailing `_` means in place. `process_set` is the set of ranks that take part. If the ranks'
arguments do not match, all ranks raise a `HorovodInternalError` that names the tensor and the ranks.
"""

from shardwise.integrations.horovod import basics
from shardwise.integrations.horovod.basics import *  # noqa: F403
from shardwise.integrations.horovod.ops import Op, handle_average_backwards_compatibility, poll, synchronize
from shardwise.integrations.horovod.torch import data_movement, reductions
from shardwise.integrations.horovod.torch.data_movement import *  # noqa: F403
from shardwise.integrations.horovod.torch.reductions import *  # noqa: F403

__all__ = ["Op", "handle_average_backwards_compatibility", "poll", "synchronize"]
__all__ += basics.__all__
__all__ += data_movement.__all__
__all__ += reductions.__all__
