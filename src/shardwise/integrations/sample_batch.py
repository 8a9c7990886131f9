"""One micro-batch of a training loader, as a model is called with it, for `preset: auto` before training begins.

[Note: which samples] Batches that are padded to their longest sample differ in size, and a plan has to fit the largest.
So some samples from all over the dataset are looked at, and those with most elements are collated. The loader itself,
its sampler and the random numbers of the process stay as they are: what is trained afterwards, in which order, does not
change. Of a dataset that can only be iterated, a copy is.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwise.errors import ConfigError
from shardwise.system.torch_private import tree_leaves

NUM_LOOKED_AT = 64


def cure(door: str) -> str:
    """What a script does whose loader has no such batch; `door` is the class that takes the plan."""
    return (
        f"Give it one: {door}(plan='auto', batch=what the model is called with). Or choose before the job: shardwise "
        f"plan --model FILE:BUILD --batch FILE:BATCH --world N --out plan.yaml, and --shardwise plan.yaml."
    )


def sample_batch(model: nn.Module, loader: Any, num_parts: int = 1, door: str = "Accelerator") -> object:
    """What `model` is called with for a batch of `loader`, a `DataLoader`, of which each of `num_parts` ranks gets a
    part: a dict of keyword arguments or a tuple. See [Note: which samples].

    Raises `ConfigError`, with what to do instead, if there is no such batch.
    """
    try:
        with same_random_numbers():
            batch = collated_batch(loader, num_parts)
        return _arguments(model, batch)
    except NoBatchError as error:
        raise ConfigError(f"{error} {cure(door)}") from error


class NoBatchError(ValueError):
    """Why a loader has no batch with which a model could be called."""


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Inside, random numbers may be drawn; afterwards those of before follow."""
    known = random.getstate(), np.random.get_state()  # what a script has seeded
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        random.setstate(known[0])
        np.random.set_state(known[1])  # likewise


def collated_batch(loader: Any, num_parts: int = 1) -> Any:
    """A batch as `loader` collates it, of the samples with most elements. Raises `NoBatchError`."""
    samples = _samples(loader.dataset)
    if not samples:
        raise NoBatchError(f"preset: auto needs a batch, but {type(loader.dataset).__name__} is empty.")
    samples.sort(key=_num_elements, reverse=True)
    if loader.batch_sampler is None and loader.batch_size is None:  # its samples are batches
        return loader.collate_fn(samples[0])
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if not size:
        raise NoBatchError(
            f"preset: auto needs a batch, but {type(loader.batch_sampler).__name__} does not say how many samples one "
            f"has."
        )
    rows = max(1, size // num_parts)
    return loader.collate_fn(list(itertools.islice(itertools.cycle(samples), rows)))


def _samples(dataset: Any) -> list[Any]:
    """At most `NUM_LOOKED_AT`: from all over a dataset that has numbers, or the first ones."""
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        step = max(1, len(dataset) // NUM_LOOKED_AT)
        return [dataset[place] for place in range(0, len(dataset), step)[:NUM_LOOKED_AT]]
    try:
        twin = copy.deepcopy(dataset)
    except Exception as error:  # of any class of the user's
        raise NoBatchError(
            f"preset: auto needs a batch, but {type(dataset).__name__} can only be iterated, and not copied "
            f"({type(error).__name__}: {error}): its first samples would be missing in training."
        ) from error
    return list(itertools.islice(iter(twin), NUM_LOOKED_AT))


def _num_elements(sample: Any) -> int:
    """How large it is: of tensors and arrays the elements, of other sequences their items."""
    if isinstance(sample, Mapping):
        return sum(map(_num_elements, sample.values()))
    if hasattr(sample, "shape"):
        return int(np.prod(sample.shape))
    if isinstance(sample, str | bytes) or not isinstance(sample, Sequence):
        return 1
    if sample and isinstance(sample[0], int | float):
        return len(sample)
    return sum(map(_num_elements, sample))


def _arguments(model: nn.Module, batch: Any) -> object:
    """How a loop would call the model: with the entries that its forward names, or as many as it needs."""
    signature = inspect.signature(model.forward)
    named = signature.parameters.values()
    if isinstance(batch, Mapping):
        takes_all = any(one.kind is one.VAR_KEYWORD for one in named)
        given = {
            name: value
            for name, value in batch.items()
            if name in signature.parameters or (takes_all and isinstance(value, torch.Tensor))
        }
        _require(signature, model, (), given)
        return given
    if isinstance(batch, torch.Tensor):
        batch = (batch,)
    if not isinstance(batch, tuple | list):
        raise NoBatchError(f"preset: auto needs a batch of tensors, but this one is {type(batch).__name__}.")
    positional = [one for one in named if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    num_needed = sum(one.default is one.empty for one in positional)
    args = tuple(batch[: max(1, num_needed)])
    _require(signature, model, args, {})
    return args


def _require(signature: inspect.Signature, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((args, kwargs))):
            raise TypeError("none of its entries is an argument with a tensor")
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise NoBatchError(
            f"preset: auto needs to know what {type(model).__name__} is called with, and it cannot be a batch of the "
            f"loader: {error}."
        ) from error
