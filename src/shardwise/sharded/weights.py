"""The weights of a sharded model as a stream of whole tensors: for samplers, servers and files.

[Note: what a stream holds] A rank has one unit whole at a time, and the tensors that wait for others of their layer:
experts that files stack otherwise, adapters and the weights that they are merged into. Names, shapes and dtypes of all
are known beforehand, from shapes alone. So nobody has to size a message by a tensor that is not gathered, or to collect
what has been gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from shardwise.checkpoint.formats.as_saved import reversal_of
from shardwise.checkpoint.formats.hf_names import ModelNames, as_in_files
from shardwise.checkpoint.formats.merged_adapters import base_model, merging, plain_name
from shardwise.checkpoint.formats.rearrangement import Named, Rearrangement
from shardwise.errors import ConfigError
from shardwise.memory.dtypes import dtype_of_codes
from shardwise.parallel.pipeline import AcrossStages
from shardwise.sharded.sharded_model import ShardedModel

Tensor = torch.Tensor
Names = Literal["hf", "module"]


@dataclass(frozen=True)
class Weight:
    """A tensor of the stream before it is there."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Whole(Protocol):
    """Whole tensors, on every rank that iterates. `likes` has them without memory, in the same order."""

    @property
    def likes(self) -> Mapping[str, Tensor]: ...

    def __iter__(self) -> Iterator[Named]: ...


class WeightStream:
    """Whole tensors with their names, unit by unit, in the same order on every rank and each time.

    To iterate is collective: all ranks do, to the end, whether they use what they get or not; a rank that stops earlier
    leaves the others waiting. `send` does that for a function that may fail. Whoever keeps a tensor keeps its whole
    unit in memory. Values are those after the last step: iterate between steps. It may be iterated again after further
    steps; after a change of plan (`engine.reshard`) or of ranks, ask for another one.
    """

    def __init__(self, whole: Whole, origins: Mapping[str, str] | str) -> None:
        self._whole = whole
        self.origins = origins
        """By name, the model's own tensor of which it is a copy, in another dtype at most; or why some are not."""
        self._weights = tuple(Weight(name, tuple(like.shape), like.dtype) for name, like in whole.likes.items())

    def metadata(self) -> tuple[Weight, ...]:
        """Name, shape and dtype of each tensor, in the order in which they come. Not collective."""
        return self._weights

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(weight.num_bytes for weight in self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def __iter__(self) -> Iterator[Named]:
        return iter(self._whole)

    def send(self, receive: Callable[[str, Tensor], None] | None) -> None:
        """Call `receive(name, tensor)` for each; a rank that gives None only takes part. All ranks call.

        If `receive` raises, this rank takes part to the end, and raises the error then.
        """
        failure: BaseException | None = None
        for name, tensor in self:
            if receive is None or failure is not None:
                continue
            try:
                receive(name, tensor)
            except BaseException as error:  # the others wait for this rank in the next unit
                failure = error
        if failure is not None:
            raise failure


def weight_stream(
    sharded: ShardedModel, names: Names, dtype: torch.dtype | None, *, merge_adapters: bool
) -> WeightStream:
    """See `Engine.weights`. All ranks call."""
    if names not in ("hf", "module"):
        raise ConfigError(
            f"weights() knows no names={names!r}: 'hf' are the names in Hugging Face's files, 'module' the model's own."
        )
    model, pipeline = sharded.model, sharded.parts.pipeline
    ties = ModelNames.of(model).ties if pipeline is None else pipeline.staged.whole.ties
    codes = {name for name, param in model.named_parameters() if dtype_of_codes(param) is not None}
    whole: Whole = _Own(sharded)
    merge = merging(model, whole.likes, ties) if merge_adapters else None
    if dtype is not None and merge is None:
        whole = _Own(sharded, dtype, codes)
    if merge is not None:
        whole = _Rearranged(whole, merge)
        ties = {plain_name(model, alias): plain_name(model, name) for alias, name in ties.items()}
        codes = {plain_name(model, name) for name in codes}
    if dtype is not None:
        whole = _Cast(whole, dtype, codes)
    if pipeline is not None:
        whole = _OfAllStages(whole, pipeline.across, ties)
    origins: Mapping[str, str] | None = {name: name for name in whole.likes}
    if names == "hf":
        base = base_model(model) if merge_adapters else model
        renaming = as_in_files(base, ties, whole.likes)
        whole, origins = _Rearranged(whole, renaming), renaming.origins()
        reversal = reversal_of(base, whole.likes)
        if reversal is not None:
            whole, origins = _Rearranged(whole, reversal), None
    if merge is not None:
        return WeightStream(whole, "adapters are merged into them")
    if codes:
        return WeightStream(whole, "they are codes of a quantizer")
    return WeightStream(whole, "files have other tensors than the model" if origins is None else origins)


class _Own:
    """What this rank's model has, in its own stages: parameters unit by unit, then persistent buffers and parameters
    that are not sharded, which every rank has. Those that are sharded may come in a narrower `dtype` already, in which
    they are then sent: see `Access.whole_params`."""

    def __init__(
        self, sharded: ShardedModel, dtype: torch.dtype | None = None, unrounded: Collection[str] = ()
    ) -> None:
        self._dtype, self._unrounded = dtype, unrounded
        self._access = sharded.parts.access
        kept = self._access.kept_params()
        model = sharded.model
        persistent = model.state_dict(keep_vars=True).keys()
        self._loose = {name: param.detach() for name, param in model.named_parameters() if name not in kept}
        self._loose |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}
        self.likes = kept | {name: torch.empty_like(one, device="meta") for name, one in self._loose.items()}

    def __iter__(self) -> Iterator[Named]:
        yield from self._access.whole_params(self._dtype, self._unrounded)
        for name, tensor in self._loose.items():
            yield name, tensor.clone()


class _Rearranged:
    def __init__(self, whole: Whole, rearrangement: Rearrangement) -> None:
        self._whole, self._rearrangement = whole, rearrangement
        self.likes = rearrangement.made

    def __iter__(self) -> Iterator[Named]:
        return self._rearrangement.of(self._whole)


class _Cast:
    """Values in another dtype. Integers, and codes of a quantizer, stay as they are."""

    def __init__(self, whole: Whole, dtype: torch.dtype, codes: Collection[str]) -> None:
        self._whole = whole
        self.likes = {
            name: like.to(dtype) if like.is_floating_point() and name not in codes else like
            for name, like in whole.likes.items()
        }

    def __iter__(self) -> Iterator[Named]:
        for name, tensor in self._whole:
            yield name, tensor.to(self.likes[name].dtype)
            del tensor


class _OfAllStages:
    """The tensors of each pipeline rank in turn, on the ranks of all stages. One that several stages have comes once,
    from the first of them, under its first name."""

    def __init__(self, own: Whole, across: AcrossStages, ties: Mapping[str, str]) -> None:
        self._own, self._across, self._ties = own, across, ties
        self._by_stage = across.described(own.likes)
        self.likes: dict[str, Tensor] = {}
        self._sent: list[set[str]] = []
        """By pipeline rank: those of its tensors, by its own names, that no earlier one has."""
        for likes in self._by_stage:
            new = {name for name in likes if ties.get(name, name) not in self.likes}
            self.likes |= {ties.get(name, name): likes[name] for name in likes if name in new}
            self._sent.append(new)

    def __iter__(self) -> Iterator[Named]:
        for pp_rank, likes in enumerate(self._by_stage):
            own = iter(self._own) if pp_rank == self._across.pp_rank else None
            for name, like in likes.items():
                tensor = next(own)[1] if own is not None else None
                if name in self._sent[pp_rank]:
                    yield self._ties.get(name, name), self._across.broadcast(pp_rank, tensor, like)
                del tensor
            if own is not None:  # no tensor is left, but its last exchanges may be
                next(own, None)
