"""The generators from which dropout draws: the ranks of a line have one in common, and each one of its own.

[Note: regions] Outside of regions all ranks of a line compute the same on the same; inside, which is from a column
module to the row module behind it, each works on its own features. With `tensor.sequence` each has its own part of the
sequence from the first block to the last. Where ranks work on different elements, dropout has to take different ones,
and elsewhere the same. So ranks start with one state in common, and where they part a generator of each rank's own is
seeded from it, which moves on by one draw: what is computed again (activation checkpointing) draws the same again.
"""

from __future__ import annotations

import torch
from torch import nn

from shardwise.comm import Group, World
from shardwise.devices import RankDevice

Tensor = torch.Tensor
_STRIDE = 1_000_003


class Generators:
    """Torch's generators on one rank: the host's, and its device's."""

    def __init__(self, device: RankDevice, place: int) -> None:
        self._device = device
        self._place = place
        self._common: list[Tensor] | None = None
        """The states in common, while this rank draws from its own."""

    @property
    def are_own(self) -> bool:
        return self._common is not None

    def part(self) -> None:
        """From here on draw numbers that no other rank of the line draws."""
        if self._common is None:
            seed = int(torch.randint(2**31, ()))
            self._common = self._states()
            torch.manual_seed(seed * _STRIDE + self._place)

    def join(self) -> None:
        """Draw what all ranks draw again."""
        if self._common is not None:
            self._restore(self._common)
            self._common = None

    def abandon(self) -> None:
        """The same, but the generators are put back by somebody else."""
        self._common = None

    def agree(self, world: World, group: Group) -> None:
        """Take over the states of the first rank of the line. All of it call."""
        collectives = world.collectives(torch.device("cpu"))
        mine = b"".join(state.numpy().tobytes() for state in self._states())
        first = collectives.exchange(mine, group, "generators")[0]
        start = 0
        taken = []
        for state in self._states():
            taken.append(torch.frombuffer(bytearray(first[start : start + len(state)]), dtype=torch.uint8))
            start += len(state)
        self._restore(taken)

    def _states(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        if self._device.accelerator is not None:
            with self._device.here():
                states.append(self._device.accelerator.rng_state())
        return states

    def _restore(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self._device.accelerator is not None:
            with self._device.here():
                self._device.accelerator.set_rng_state(states[1])


def draws(model: nn.Module) -> bool:
    """Whether a forward of `model` in training draws random numbers, as far as its modules tell: dropout modules, and
    attributes such as `attention_dropout` and a router's `jitter_noise`."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        numbers = {name: value for name, value in vars(module).items() if type(value) is float and value > 0}
        if any("drop" in name or "jitter" in name for name in numbers):
            return True
    return False
