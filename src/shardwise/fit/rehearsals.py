"""What a model computes and holds in one micro-batch, for each way to split it and to treat its activations.

What a rehearsal on fake tensors finds does not depend on where parameters lie or how many ranks copy them; so a few of
them serve many candidates of a search.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field, replace

from torch import nn

from shardwise.errors import ConfigError, ModelError
from shardwise.fit.batch_rows import rows_of, with_rows
from shardwise.fit.candidates import ON_DEVICE, SCHEDULE, SPLITTING, Candidate
from shardwise.fit.derived_counts import between
from shardwise.fit.equal_blocks import treats_alike, without_values
from shardwise.fit.few_blocks import FewBlocks
from shardwise.fit.foreseen import Counted, WithBlocks, count_step, parts_of
from shardwise.plan import Plan
from shardwise.plan.mesh import Mesh


@dataclass
class Rehearsals:
    """Those of `model`, which is only read, with micro-batches like `batch`: see `ModelSubject`. What two tell of is
    derived: see [Note: derived counts]."""

    model: nn.Module
    batch: object
    base: Plan
    on_cpu: bool = True
    varies_rows: bool = True
    """Whether micro-batches of other sizes will be asked for."""
    num_made: int = field(default=0, init=False)
    """How many there were: what follows from all that is known holds until there is another one."""
    _counted: dict[object, list[Counted] | ModelError | ConfigError] = field(default_factory=dict, init=False)
    _between: dict[object, Counted | None] = field(default_factory=dict, init=False)
    _is_tried: bool = field(default=False, init=False)
    first_is_apart: bool = field(default=False, init=False)
    """Whether the model does other things with `rows_of_batch` samples than with more, such as with a single one."""

    def __post_init__(self) -> None:
        self._few = FewBlocks.of(self.model)
        self.rows_of_batch = rows_of(self.batch)

    @property
    def rows_of_size(self) -> int:
        """Samples of the rehearsals that every treatment of activations has: those of the batch, or twice as many, if
        those of the batch are apart."""
        if self.varies_rows and not self._is_tried:
            self._is_tried = True
            one = Candidate(ON_DEVICE[0], (("dp", 1),), self.rows_of_batch, 1)
            (few,), (more,) = (self.count(replace(one, rows=times * self.rows_of_batch)) for times in (1, 2))
            self.first_is_apart = between(few, more, 0.5) is None
        return self.rows_of_batch * (2 if self.first_is_apart else 1)

    def derived(self, candidate: Candidate, *, approximately: bool = False) -> list[Counted]:
        """Without a pipeline, for any size of a micro-batch; `approximately` also for those that are apart."""
        whole, first = of_model(candidate), self.rows_of_size
        is_apart = self.first_is_apart and whole.rows < first and not approximately
        if self.is_rehearsed(whole) or whole.rows in (first, 2 * first) or is_apart:
            return self.count(whole)
        key = rehearsal_key(whole)
        if key not in self._between:
            (few,), (more,) = (self.count(replace(whole, rows=rows)) for rows in (first, 2 * first))
            self._between[key] = between(few, more, (whole.rows - first) / first)
        found = self._between[key]
        return self.count(whole) if found is None else [found]

    def is_derived(self, candidate: Candidate) -> bool:
        """Whether what is known tells of it, without another rehearsal."""
        whole, first = of_model(candidate), self.rows_of_size
        needed = (replace(whole, rows=rows) for rows in (first, 2 * first))
        return self.is_rehearsed(whole) or all(map(self.is_rehearsed, needed))

    def is_rehearsed(self, candidate: Candidate) -> bool:
        return (rehearsal_key(candidate), False) in self._counted

    def message_bytes(self, candidate: Candidate) -> int:
        """Of the activations of one micro-batch that a stage sends on: of two stages, unless the plan lists its own,
        which send the same on any number of ranks along `tp`, unless these have parts of a sequence, or the plan says
        what else is split."""
        kept = replace(candidate, rows=self.rows_of_batch, policy="keep")
        if self.base.pipeline.stages == "auto":
            tensor = self.base.tensor
            few = {"pp": 2} if tensor.sequence or tensor.plan is not None else {"pp": 2, "tp": 1}  # blocks return all
            sizes = tuple((axis, few.get(axis, size)) for axis, size in candidate.sizes)
            kept = replace(kept, sizes=sizes, schedule=SCHEDULE, chunks=1, accumulate=2)
        found = self.count(kept, for_messages=True)
        most = max((num_bytes for one in found for num_bytes in one.message_bytes.values()), default=0)
        return most * candidate.rows // self.rows_of_batch

    def count(self, candidate: Candidate, *, for_messages: bool = False) -> list[Counted]:
        """Of one micro-batch, on as few ranks as have the same parts; `for_messages`, with as few blocks as have the
        same messages."""
        key = rehearsal_key(candidate), for_messages
        found = self._counted.get(key)
        if found is None:
            try:
                found = self._rehearsed(candidate, for_messages=for_messages)
            except (ModelError, ConfigError) as error:
                found = error
            if not gc.isenabled():  # a search looks after it: the copies of modules are cycles, and no older than this
                gc.collect(0)
            self._counted[key] = found
            self.num_made += 1
        if isinstance(found, ModelError | ConfigError):
            raise found
        return found

    def _rehearsed(self, candidate: Candidate, *, for_messages: bool) -> list[Counted]:
        sizes = {axis: size if axis in SPLITTING else 1 for axis, size in candidate.sizes}
        mesh = Mesh(tuple(sizes), tuple(sizes.values()))
        small = candidate.plan(self.base).model_copy(update={"mesh": sizes})
        batch = with_rows(self.batch, candidate.rows, self.rows_of_batch, candidate.size("sp"))
        tells = not self.on_cpu and candidate.policy != "disk"
        with_blocks = self._few.with_blocks if tells and self._few.is_checked else None

        def count(model: nn.Module, with_blocks: WithBlocks | None = None) -> list[Counted]:
            if not mesh.has_stages:
                return count_step(model, batch, small, mesh, counts_work=not for_messages, on_cpu=self.on_cpu)
            parts = parts_of(model, small, mesh, on_cpu=self.on_cpu)
            is_call = candidate.parts > 0
            return parts.of_stages(model, batch, counts_work=not for_messages, as_call=is_call, with_blocks=with_blocks)

        if self._few.blocks is not None and treats_alike(small):
            if for_messages and small.pipeline.stages == "auto":
                return count(self._few.with_blocks(2 * candidate.size("pp")))
            if tells and candidate.size("pp") == 1:
                split = tuple(axis for axis, size in sizes.items() if size > 1)
                treatment = candidate.policy, candidate.precision
                found = self._few.count(lambda model: count(model)[0], treatment, split)
                if found is not None:
                    return [found]
        return count(without_values(self.model), with_blocks)


def of_model(candidate: Candidate) -> Candidate:
    """The same without a pipeline, of one micro-batch."""
    sizes = tuple((axis, 1 if axis == "pp" else size) for axis, size in candidate.sizes)
    return replace(candidate, sizes=sizes, accumulate=1, schedule=SCHEDULE, chunks=1, parts=0)


def rehearsal_key(candidate: Candidate) -> object:
    """What a rehearsal depends on."""
    stages = candidate.size("pp")
    scheduled = candidate.schedule, candidate.chunks, candidate.accumulate, candidate.parts
    of_stages = scheduled if stages > 1 else ()
    split = tuple((axis, size) for axis, size in candidate.sizes if axis in SPLITTING and size > 1)
    return split, of_stages, candidate.rows, candidate.policy, candidate.precision
