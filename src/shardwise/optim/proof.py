"""What is found out about an optimizer of whose class nothing is known, by trial steps.

[Note: proof by operations] That a whole parameter and its pieces come out alike in a few steps proves little: a norm
over all gradients that does not exceed its limit, a warm-up from a learning rate of 0 or a projection under a condition
hides what the next step does. So the operations themselves are watched. If every one that reads more than one number
is elementwise, over tensors of the same size, then nothing in an element's update can come from another element, and
no condition of the step can either. What is left are conditions on what is no tensor: counts of steps, settings and
shapes. So the trials go on to the counts that settings and code name, change the learning rate, and have parameters
with the dimensions of the model's, small and large. And pieces are compared with whole parameters all the same, because
an update may be scaled by a shape.

There is no way to overrule the finding: what it refuses works with `ddp`, and anything else would be wrong without a
word.
"""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import torch

from shardwise.errors import ModelError
from shardwise.optim.elementwise import FoundOperation, Watch
from shardwise.optim.trials import LARGE, NUM_LARGE_STEPS, NUM_STEPS, SMALL, Trial, shapes_of, turning_points
from shardwise.program import Update

Tensor = torch.Tensor
ADVICE = {
    "Muon": "Use shardwise.optim.Muon, which takes the same settings and works on whole matrices.",
    "Lamb": "Use shardwise.optim.Lamb, which sums the norms over all ranks.",
    "LAMB": "Use shardwise.optim.Lamb, which sums the norms over all ranks.",
    "Adafactor": "Use shardwise.optim.Adafactor, which sums rows and columns over all ranks.",
    "AdaFactor": "Use shardwise.optim.Adafactor, which sums rows and columns over all ranks.",
    "LBFGS": "It evaluates the model several times in a step and looks at all parameters together; use AdamW or SGD.",
    "SparseAdam": "Make the embedding with sparse=False, and use Adam or AdamW.",
}
"""By the name of the class, whichever library it is from."""
OF_BITSANDBYTES = (
    "Use shardwise.optim.AdamW(state_dtype='int8'), which keeps its states in 8 bits too; with Trainer, "
    "optimizers=(optimizer, None) in the place of optim='adamw_bnb_8bit' or another of bitsandbytes."
)
OTHERWISE = "Use an elementwise optimizer such as AdamW, SGD or Adagrad, or one of shardwise.optim."


def tried(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Update:
    """How `optimizer` updates parameters with the settings and the shapes of `group`: see `updates_of`."""
    name = _named(optimizer)
    inner = next((key for key, value in vars(optimizer).items() if isinstance(value, torch.optim.Optimizer)), None)
    if inner is not None:
        raise ModelError(
            f"{name} wraps another optimizer (its {inner}), which would go on to update the model's own parameters. "
            f"Give shard() the inner one, before it is wrapped."
        )
    reason = _looks_further(optimizer, group)
    small, large = shapes_of(group, SMALL), shapes_of(group, LARGE)
    try:
        trial, again = Trial(optimizer, group, small, watch=Watch(only_random=True)), Trial(optimizer, group, small)
        for one in (trial, again):
            one.run(NUM_STEPS)
        at_large = Trial(optimizer, group, large, watch=Watch(only_random=True))
        at_large.run(NUM_LARGE_STEPS)
        _check_closure(optimizer, group)
    except FoundOperation as found:
        raise ModelError(
            f"{name} draws random numbers ({found.name}), which are others on each rank and for each piece of a "
            f"parameter. {_advice(optimizer)}"
        ) from None
    except ModelError:
        raise
    except Exception as error:  # an optimizer that raises anything here cannot be used
        raise ModelError(
            f"{name} cannot take a step on a parameter and its gradient alone ({type(error).__name__}: {error}). "
            f"{_advice(optimizer)}"
        ) from error
    if not all(map(_is_same, trial.values, again.values)):
        raise ModelError(f"Two equal steps of {name} have different results, so ranks would part. {_advice(optimizer)}")
    if odd := trial.odd_state() or at_large.odd_state():
        raise ModelError(
            f"{name} keeps {odd}, and of optimizers the engine can gather, save and load tensors and numbers that "
            f"belong to parameters. {_advice(optimizer)}"
        )
    if all(map(_is_same, trial.values, trial.first)):
        raise ModelError(
            f"{name} does not update the parameters of its param_groups, to which the engine gives what it shards. If "
            f"it holds others, or another optimizer that does, give shard() that one."
        )
    return Update(trial.states(), whole=f"{reason} {_advice(optimizer)}" if reason else None)


def _named(optimizer: torch.optim.Optimizer) -> str:
    """Its class, with its library if torch has another one of that name."""
    kind = type(optimizer)
    library = kind.__module__.partition(".")[0]
    is_ambiguous = library != "torch" and hasattr(torch.optim, kind.__name__)
    return f"{kind.__name__} of {library}" if is_ambiguous else kind.__name__


def _advice(optimizer: torch.optim.Optimizer) -> str:
    kind = type(optimizer)
    return OF_BITSANDBYTES if kind.__module__.startswith("bitsandbytes.") else ADVICE.get(kind.__name__, OTHERWISE)


def _looks_further(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> str | None:
    """Why `optimizer` cannot be given pieces of parameters, as a sentence; `None` if it can."""
    name = _named(optimizer)
    try:
        small = Trial(optimizer, group, shapes_of(group, SMALL), watch=Watch())
        small.run(NUM_STEPS, turning_points(optimizer, group))
        Trial(optimizer, group, shapes_of(group, LARGE), watch=Watch()).run(NUM_LARGE_STEPS)
        whole = Trial(optimizer, group, shapes_of(group, SMALL))
        whole.run(NUM_STEPS)
        for cut in (0.3, 0.75):
            parts = [Trial(optimizer, group, shapes_of(group, SMALL), part) for part in ((0.0, cut), (cut, 1.0))]
            for part in parts:
                part.run(NUM_STEPS)
            together = map(torch.cat, zip(*(part.values for part in parts), strict=True))
            if not all(map(_is_close, whole.values, together)):
                return f"{name} is not elementwise: it updates a parameter differently from its pieces."
    except FoundOperation as found:
        return (
            f"{name} is not elementwise: its step calls {found.name}, by which an element's update may depend on other "
            f"elements."
        )
    except Exception as error:  # of a trial that it does not survive, nothing is known
        return f"{name} cannot be tried on pieces of parameters ({type(error).__name__}: {error})."
    return None


def _check_closure(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Raise `ModelError` for a step that needs more of a closure than that it was called once, before the step."""
    if "closure" not in inspect.signature(type(optimizer).step).parameters:
        return
    name = _named(optimizer)
    trials = [Trial(optimizer, group, shapes_of(group, SMALL)) for _ in range(2)]
    for step, (number, trial) in itertools.product(range(NUM_STEPS), enumerate(trials)):
        before, calls = [value.clone() for value in trial.values], []

        def closure() -> Tensor:
            calls.append(all(map(_is_same, trial.values, before)))  # noqa: B023  # called within this step
            return torch.tensor((step + 1.0) ** number, device="cpu")  # noqa: B023

        trial.step(closure)
        if len(calls) > 1 or not all(calls):
            raise ModelError(
                f"{name} evaluates its closure {'several times' if len(calls) > 1 else 'at other parameters'} within a "
                f"step, and gradients are reduced once, before it. {_advice(optimizer)}"
            )
    if not all(map(_is_same, trials[0].values, trials[1].values)):
        raise ModelError(f"{name} reads the loss in its step, which is another on each rank. {_advice(optimizer)}")


def _is_same(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _is_close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-5, atol=1e-7, equal_nan=True)
