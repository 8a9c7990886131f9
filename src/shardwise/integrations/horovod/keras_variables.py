"""Broadcast of Keras variables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from shardwise.integrations.horovod import numpy as by_numpy


def broadcast_variables(variables: Iterable[Any], root_rank: int) -> None:
    """Broadcast `root_rank`'s values of Keras `variables` to all ranks, which must list them in the same order."""
    listed = list(variables)
    handles = [
        by_numpy.broadcast_async(np.asarray(keras.ops.convert_to_numpy(one.value)), root_rank, f"variable.{index}")
        for index, one in enumerate(listed)
    ]
    for variable, handle in zip(listed, handles, strict=True):
        variable.assign(handle.wait())
