"""Random number generators for dropout: one state that the ranks of a line share, and one state per rank.

[Note: regions] A region reaches from a column module to the row module after it. Outside of regions all ranks of a line
compute the same; inside, each works on its own features. With `tensor.sequence`, each rank works on its part of the
sequence from the first block to the last. Dropout must draw different numbers where ranks work on different elements,
and the same numbers elsewhere. So ranks start from a common state. Where they diverge, each rank's own generator is
seeded by one draw from the common one, so that recomputed activations (checkpointing) draw the same numbers again. This
corresponds to Megatron-LM's `CudaRNGStatesTracker`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from shardwise.comm import Group, World
from shardwise.runtime.dropped_layers import dropped_layers
from shardwise.system.devices import RankDevice

Tensor = torch.Tensor
_STRIDE = 1_000_003


class Generators:
    """Torch's default generators on one rank: that of the CPU, and that of its device."""

    def __init__(self, device: RankDevice, index: int) -> None:
        self._device = device
        self._index = index
        self._common: list[Tensor] | None = None
        """The common states, saved while this rank uses its own."""

    @property
    def are_own(self) -> bool:
        return self._common is not None

    def use_own(self) -> None:
        """Draw numbers that differ from those of other ranks of the line from now on."""
        if self._common is None:
            seed = int(torch.randint(2**31, (), device="cpu"))
            self._common = self.states()
            torch.manual_seed(seed * _STRIDE + self._index)

    def use_common(self) -> None:
        """Draw the same numbers as all ranks of the line from now on."""
        if self._common is not None:
            self.restore(self._common)
            self._common = None

    @contextmanager
    def own_inside(self) -> Iterator[None]:
        """Inside, draw numbers that differ from those of other ranks of the line; afterwards the same ones again."""
        self.use_own()
        try:
            yield
        finally:
            self.use_common()

    def drop_common(self) -> None:
        """Forget the saved common states, because the caller restores the generators itself."""
        self._common = None

    def synchronize(self, world: World, group: Group) -> None:
        """Take over the states of the first rank of the line. Collective."""
        collectives = world.collectives(torch.device("cpu"))
        mine = b"".join(state.numpy().tobytes() for state in self.states())
        first = collectives.exchange(mine, group, "generators")[0]
        start = 0
        received = []
        for state in self.states():
            received.append(torch.frombuffer(bytearray(first[start : start + len(state)]), dtype=torch.uint8))
            start += len(state)
        self.restore(received)

    def states(self) -> list[Tensor]:
        """The present states, for `restore`."""
        states = [torch.get_rng_state()]
        if self._device.accelerator is not None:
            with self._device.here():
                states.append(self._device.accelerator.rng_state())
        return states

    def restore(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self._device.accelerator is not None:
            with self._device.here():
                self._device.accelerator.set_rng_state(states[1])


def draws(model: nn.Module) -> bool:
    """Whether a training forward of `model` draws random numbers, judging by its dropout modules and by attributes such
    as `attention_dropout` and a router's `jitter_noise`, or because it skips layers."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        numbers = {name: value for name, value in vars(module).items() if type(value) is float and value > 0}
        if any("drop" in name or "jitter" in name for name in numbers):
            return True
    return bool(dropped_layers(model))
