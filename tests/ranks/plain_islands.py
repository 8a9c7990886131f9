"""DiLoCo and streaming DiLoCo as the papers have them, in one process: whole models, trained one after the other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.plan import Islands

Tensor = torch.Tensor
Values = dict[str, Tensor]
Make = Callable[[Any], torch.optim.Optimizer]
Loss = Callable[[Callable[[Tensor], Tensor], Tensor, Tensor], Tensor]


class PlainIslands:
    """Islands by names. Outer steps are torch's SGD; `units` are the names of the modules that are dealt out to
    fragments."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[str],
        settings: Islands,
        make: Make,
        loss: Loss,
        names: Iterable[Hashable],
        rounded: Callable[[Tensor], Tensor] = lambda matrix: matrix,
    ) -> None:
        """`rounded` is what matrices of outer gradients go through where there are other islands."""
        by = settings.optimizer
        self._settings, self._make, self._loss, self._rounded = settings, make, loss, rounded
        self.models = {name: copy.deepcopy(model) for name in names}
        self._inner = {name: make(one.parameters()) for name, one in self.models.items()}
        self.common = dict(copy.deepcopy(model).named_parameters())
        self.outer = torch.optim.SGD(
            self.common.values(), lr=by.lr, momentum=by.momentum, nesterov=by.nesterov and by.momentum > 0
        )
        of_units = [[name for name in self.common if name.startswith(f"{unit}.")] for unit in units]
        self._fragments = [
            [name for unit in of_units[number :: settings.fragments] for name in unit]
            for number in range(settings.fragments)
        ]
        self._on_its_way: dict[int, Values] = {}
        self._num_steps = 0

    def go_on_with(self, names: Sequence[Hashable]) -> None:
        """Some islands are lost, or others join: these begin as the first of those that stay. What is on its way is
        not used."""
        if list(names) == list(self.models):
            return
        first = next(name for name in self.models if name in names)
        models, inner = {}, {}
        for name in names:
            if name in self.models:
                models[name], inner[name] = self.models[name], self._inner[name]
            else:
                models[name] = copy.deepcopy(self.models[first])
                inner[name] = self._make(models[name].parameters())
                inner[name].load_state_dict(copy.deepcopy(self._inner[first].state_dict()))
        self.models, self._inner = models, inner
        self._on_its_way = {}

    def step(self, shares: Iterable[tuple[Tensor, Tensor]]) -> None:
        """A step of each island on its share, if its gradients are finite, and the outer steps that follow."""
        settings = self._settings
        self._num_steps += 1
        for model, optimizer, share in zip(self.models.values(), self._inner.values(), shares, strict=True):
            optimizer.zero_grad()
            self._loss(model, *share).backward()  # type: ignore[no-untyped-call]  # torch's own
            if all(bool(param.grad.isfinite().all()) for param in model.parameters() if param.grad is not None):
                optimizer.step()
        for number, names in enumerate(self._fragments):
            begins = (number + 1) * settings.every // settings.fragments
            if self._num_steps % settings.every == begins % settings.every:
                self._on_its_way[number] = self._outer_gradients(names)
            ends = begins + settings.overlap
            if self._num_steps % settings.every == ends % settings.every and number in self._on_its_way:
                self._outer_step(self._on_its_way.pop(number))

    def _outer_gradients(self, names: Sequence[str]) -> Values:
        return {name: torch.stack(self._of_islands(name)).mean(0) for name in names}

    def _of_islands(self, name: str) -> list[Tensor]:
        own = [model.get_parameter(name).detach() for model in self.models.values()]
        apart = [self.common[name].detach() - one for one in own]
        is_sent_in_codes = len(apart) > 1 and apart[0].dim() > 1
        return [self._rounded(one) for one in apart] if is_sent_in_codes else apart

    def _outer_step(self, gradients: Values) -> None:
        for name, param in self.common.items():
            param.grad = gradients.get(name)
        self.outer.step()
        for model in self.models.values():
            for name, param in model.named_parameters():
                if name in gradients:
                    param.data.lerp_(self.common[name].data, 1 - self._settings.mix)
