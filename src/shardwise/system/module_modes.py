"""Training and evaluation mode of a model and each of its modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Inside, all of `model` is in evaluation mode; afterwards each module is in its own mode again.

    `model.train()` alone would also set modules to training that the user keeps in evaluation, such as the batch norms
    of a pretrained part. It is called all the same, because a model may do something in its own `train`.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        model.train(modes[model])
        for module, is_training in modes.items():
            module.training = is_training
