"""What a rank is in during a void iteration: see [Note: iterations] in `session.py`."""

from __future__ import annotations

from contextlib import ExitStack, suppress

import numpy as np
import torch
from torch import nn

from shardwise.errors import CommError
from shardwise.memory import is_at_rest
from shardwise.parallel.experts.totals import totals_of_this_rank
from shardwise.sharded.sharded_model import ShardedModel


class QuietMode:
    """Parameters are gathered as in `engine.inference()`, and nothing is sent. What ranks compute that share layers,
    samples or experts (`tp`, `sp`, `ep`) has the right shapes only, since each runs at its own pace, or not at all. A
    model in pipeline stages does not run: no stage has what it would receive. Whether gradients are enabled stays as
    the loop has it.

    Parameters are plain tensors meanwhile. A loop may look at their gradients behind its backward, so they have some:
    zeros, of which no page is in memory before it is written to."""

    def __init__(self) -> None:
        self.is_on = False
        self.is_undefined = False
        """Whether only the shapes of the model's outputs mean anything."""
        self._inside = ExitStack()
        self._trained: list[nn.Parameter] = []

    def enter(self, sharded: ShardedModel) -> None:
        grads = torch.is_grad_enabled()
        self._inside = ExitStack()
        try:
            members = sharded.peers.group if sharded.parts.pipeline is not None else None
            self._inside.enter_context(sharded.converted.suspended())
            self._inside.enter_context(totals_of_this_rank(sharded.model))
            self._inside.enter_context(sharded.parts.runner.inference(sharded.world, None, members))
            lines = sharded.lines
            for line in lines:  # sequences stay split, unlike in inference: the loop has its part of the batch
                self._inside.enter_context(line.silent())
            self.is_undefined = bool(lines)
        finally:
            torch.set_grad_enabled(grads)
        self.is_on = True
        self._trained = [param for param in sharded.model.parameters() if param.requires_grad and not is_at_rest(param)]

    def give_gradients(self) -> None:
        """As a backward would."""
        for param in self._trained:
            if param.grad is None:
                zeros = torch.from_numpy(np.zeros(param.nbytes, np.uint8))
                param.grad = zeros.view(param.dtype).view(param.shape).to(param.device)

    def leave(self, fault: BaseException | None = None) -> None:
        """After a `fault`, without the steps that need other ranks. Does nothing if it is not on."""
        if not self.is_on:
            return
        self.is_on = False
        for param in self._trained:
            param.grad = None
        grads = torch.is_grad_enabled()
        if fault is None:
            with suppress(CommError):  # streamed parameters end together; what comes next meets the fault
                self._inside.close()
        else:
            self._inside.__exit__(type(fault), fault, None)
        torch.set_grad_enabled(grads)
