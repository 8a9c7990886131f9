"""Weights of one rank's micro-batches, for ranks with different numbers of samples.

[Note: weights] Gradients are averaged over ranks and micro-batches with equal weights. If rank r has n of the N samples
of all ranks in a micro-batch, this average equals the mean over all samples once everything of rank r is multiplied by
its weight, n * ranks / N. The weight is applied to its gradients as they arrive, in the multiplication that averages
them anyway; or to the loss, if the gradients of one rank come from the rows of others (experts, batch norms over all
ranks) or are summed over micro-batches with several weights before they reach their owner (pipelines). A rank without
samples has the weight 0 and takes part in every collective.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shardwise.errors import ConfigError

MAX_MICRO_BATCHES = 1024
"""The most micro-batches of one step."""


class Weighing:
    """The weights of this rank's micro-batches, which are announced before each."""

    def __init__(self) -> None:
        self.current = 1.0
        """The weight of the next micro-batch."""
        self.reported = 1.0
        """The weight of the last micro-batch, or of the whole step if one call ran several."""
        self.is_used = False
        """Whether any weight was announced, so that this rank's metrics need a weighted mean."""
        self._announced: deque[float] = deque(maxlen=MAX_MICRO_BATCHES)

    def announce(self, samples: int, of: float, num_ranks: int) -> None:
        """Announce that this rank has `samples` of the `of` samples that all `num_ranks` have in the next micro-batch.

        Raises `ConfigError` for invalid numbers.
        """
        if not (of > 0 and samples >= 0):
            raise ConfigError(
                f"weigh({samples}, of={of}): give 0 or more samples, of more than 0 on all ranks together."
            )
        self.current = self.reported = samples * num_ranks / of
        self.is_used = True
        self._announced.append(self.current)

    def take(self, num: int) -> list[float]:
        """The weights of the `num` micro-batches of a step that one call runs: those announced for each, or all
        equal."""
        announced = list(self._announced)
        self._announced.clear()
        weights = announced[-num:] if len(announced) >= num else [self.current] * num
        self.reported = sum(weights) / num
        return weights

    @contextmanager
    def during(self, weight: float) -> Iterator[None]:
        """A context in which a micro-batch of this `weight` runs, which need not be the one announced last."""
        before, self.current = self.current, weight
        try:
            yield
        finally:
            self.current = before

    def begin_step(self) -> None:
        """Forget what was announced for the last step."""
        self._announced.clear()


def mean_of(values: Sequence[float], weights: Sequence[float]) -> float:
    """The mean of `values`, weighted by `weights`; the plain mean if all weights are 0."""
    if all(weight == weights[0] for weight in weights):
        return sum(values) / len(values)
    return sum(value * weight for value, weight in zip(values, weights, strict=True) if weight) / sum(weights)
