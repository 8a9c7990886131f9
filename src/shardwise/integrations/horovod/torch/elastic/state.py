"""The state of a training loop: models, optimizers, samplers and plain values."""

from __future__ import annotations

import copy
from typing import Any

import torch

from shardwise.integrations.horovod.elastic import ObjectState
from shardwise.integrations.horovod.torch.elastic.sampler import ElasticSampler
from shardwise.integrations.horovod.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)


class TorchState(ObjectState):
    """Models, optimizers, samplers and plain values: `TorchState(model=model, optimizer=optimizer, batch=0)`.

    All keywords become attributes. `commit` copies them into this process's memory: modules, optimizers and
    `ElasticSampler`s by their state dicts, other values as a whole.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        given = {"model": model, "optimizer": optimizer, **kwargs}
        kinds = (torch.nn.Module, torch.optim.Optimizer, ElasticSampler)
        self._stateful = {name: value for name, value in given.items() if isinstance(value, kinds)}
        self._saved: dict[str, Any] = {}
        plain = {name: value for name, value in given.items() if name not in self._stateful and value is not None}
        for name, value in self._stateful.items():
            setattr(self, name, value)
        super().__init__(broadcast_object, **plain)

    def save(self) -> None:
        self._saved = {name: copy.deepcopy(value.state_dict()) for name, value in self._stateful.items()}
        super().save()

    def restore(self) -> None:
        for name, value in self._stateful.items():
            value.load_state_dict(copy.deepcopy(self._saved[name]))
        super().restore()

    def sync(self) -> None:
        """Copy rank 0's values to all ranks. A sampler's processed samples are those of all ranks."""
        for name, value in self._stateful.items():
            if isinstance(value, torch.nn.Module):
                broadcast_parameters(value.state_dict(), 0)
            elif isinstance(value, torch.optim.Optimizer):
                broadcast_optimizer_state(value, 0)
            else:
                states = allgather_object(value.state_dict(), f"sampler.{name}")
                processed = set().union(*(one["processed_indices"] for one in states))
                value.load_state_dict({"epoch": states[0]["epoch"], "processed_indices": processed})
        super().sync()

    def on_reset(self) -> None:
        for value in self._stateful.values():
            if isinstance(value, ElasticSampler):
                value.reset()
        super().on_reset()
