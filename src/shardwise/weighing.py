"""How much the micro-batches of one rank count, where ranks do not have the same number of samples.

[Note: weights] Gradients are averaged over ranks and micro-batches, each of which counts the same. If rank r has n of
the N samples that the ranks have in a micro-batch, the mean over all samples is that same average once everything of
rank r is multiplied by its weight, n * ranks / N: its gradients as they come in, in the one multiplication by which
they are averaged anyway; or the loss they are of, where the gradient of one rank comes from the tokens of others
(experts) or is summed over micro-batches of several weights before it is at home (pipelines). A rank without samples
has the weight 0 and takes part in every collective.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from shardwise.errors import ConfigError

MOST_SAID = 1024
"""More micro-batches than that are not in one step."""


class Weighing:
    """The weights of this rank's micro-batches, as they are said before each."""

    def __init__(self) -> None:
        self.current = 1.0
        """Of what runs next."""
        self.reported = 1.0
        """Of what ran last: of a whole step where one call ran several micro-batches."""
        self.is_used = False
        """Whether any has been said, so that this rank's figures are not simply averaged with those of others."""
        self._said: deque[float] = deque(maxlen=MOST_SAID)

    def say(self, samples: int, of: float, num_ranks: int) -> None:
        """This rank has `samples` of the `of` that all `num_ranks` have in the next micro-batch.

        Raises `ConfigError` for numbers that cannot be meant.
        """
        if not (of > 0 and samples >= 0):
            raise ConfigError(
                f"weigh({samples}, of={of}): give 0 or more samples, of more than 0 on all ranks together."
            )
        self.current = self.reported = samples * num_ranks / of
        self.is_used = True
        self._said.append(self.current)

    def take(self, num: int) -> list[float]:
        """The weights of the `num` micro-batches of a step, which are given to one call: as said for each, or all
        alike."""
        said = list(self._said)
        self._said.clear()
        weights = said[-num:] if len(said) >= num else [self.current] * num
        self.reported = sum(weights) / num
        return weights

    def begin_step(self) -> None:
        """What was said for the last step is of no use any more."""
        self._said.clear()


def mean_of(values: Sequence[float], weights: Sequence[float]) -> float:
    """The mean of `values`, each counted by its weight. Where nothing counts, the plain mean."""
    total = sum(weights)
    if not total:
        return sum(values) / len(values)
    if all(weight == weights[0] for weight in weights):
        return sum(values) / len(values)
    return sum(value * weight for value, weight in zip(values, weights, strict=True) if weight) / total
