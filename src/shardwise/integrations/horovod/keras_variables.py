"""Broadcast of Keras variables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from shardwise.integrations.horovod import numpy as numpy_hvd


def broadcast_variables(variables: Iterable[Any], root_rank: int) -> None:
    """Broadcast `root_rank`'s values of Keras `variables` to all ranks, which must list them in the same order."""
    variables = list(variables)
    handles = [
        numpy_hvd.broadcast_async(np.asarray(keras.ops.convert_to_numpy(one.value)), root_rank, f"variable.{index}")
        for index, one in enumerate(variables)
    ]
    for variable, handle in zip(variables, handles, strict=True):
        variable.assign(handle.wait())
