"""First values of Keras variables from one rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from shardwise.integrations.horovod import numpy as by_numpy


def broadcast_variables(variables: Iterable[Any], root_rank: int) -> None:
    """Give all ranks `root_rank`'s values of Keras `variables`, listed in the same order."""
    listed = list(variables)
    under_way = [
        by_numpy.broadcast_async(np.asarray(keras.ops.convert_to_numpy(one.value)), root_rank, f"variable.{place}")
        for place, one in enumerate(listed)
    ]
    for variable, handle in zip(listed, under_way, strict=True):
        variable.assign(handle.wait())
