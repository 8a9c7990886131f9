"""What a rank's parameters are of the model's, where pipeline stages or model axes leave it a part of them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from shardwise.errors import whose_engine

_log = logging.getLogger("shardwise")
_OF_THE_WHOLE = (
    "engine.state_dict(), engine.get(name) and engine.gradient_norm, called by all ranks, are of the whole model."
)


@dataclass(frozen=True)
class OwnShare:
    """Says once what a loop may take for the whole model's."""

    trained: frozenset[str] = field(repr=False)
    """The rank's trained parameters by name."""
    numel: int
    """How many elements the rank has of all."""
    whole_numel: int
    """How many the model has."""
    _counted: set[str] = field(default_factory=set, repr=False)
    _taken: set[str] = field(default_factory=set, repr=False)
    _hooked: set[str] = field(default_factory=set, repr=False)

    def note_counted(self, *names: str) -> None:
        """It was asked how many elements parameters have. Says, once it was asked of all that are trained, that their
        sum is not the model's: loops print it, and have often no other use for it."""
        if self._complete(self._counted, names):
            _log.warning(
                "Counts over model.parameters(), such as a sum of numel(), are of what this rank has, %s.", self
            )

    def note_written(self, name: str) -> None:
        """Whoever writes to a parameter, or to its gradient, has asked how large it is for that, and not to count: so
        do `torch.nn.init`, `load_state_dict` and loops that add noise. Of torch's own functions, which do not say that
        they call, no others were seen to ask in 142 tests of loops, but `torch.testing`, whose comparison counts."""
        if self._counted != self.trained:
            self._counted.discard(name)

    def note_taken(self, names: Iterable[str]) -> None:
        """A loop has taken values out of what was computed of these parameters, as numbers, an array or a file, which
        carry no mark. Says, once it has of all that are trained, that what it makes of them together is not the
        model's: `numpy.array([p.norm().item() for p in model.parameters()])` asks nobody."""
        if self._complete(self._taken, names):
            _log.warning(
                "Values were taken of each of model.parameters(), which are those that this rank has, %s. So a mean or "
                "a norm of them, or a file or a model that has them, is of these alone. %s",
                self, " ".join(filter(None, (_OF_THE_WHOLE, whose_engine(_OF_THE_WHOLE)))),
            )  # fmt: skip

    def note_hook(self, name: str) -> None:
        """Code has put a hook on the gradient of a parameter that is in a stage, or split. Says so once."""
        if not self._hooked:
            self._hooked.add(name)
            _log.warning(
                "The hook on %s gets the gradient as this rank computes it: in pipeline stages that of each "
                "micro-batch, of which a call of the model has several, and of a parameter that a model axis splits "
                "that of the rank's part. To scale it is right. Norms, clipping and what else is not proportional to "
                "it belong between backward and step, where param.grad is the gradient of the step.",
                name,
            )

    def __str__(self) -> str:
        return f"{self.numel:,} elements of the model's {self.whole_numel:,}"

    def _complete(self, found: set[str], names: Iterable[str]) -> bool:
        """Whether `names` have the last of those that are trained to be `found`, where they are put."""
        num_before = len(found)
        found.update(self.trained.intersection(names))
        return num_before < len(found) == len(self.trained)
