"""Faults that the tests have to catch, each a small edit of the source: what `python -m tests.mutations` seeds.

A fault names text that is in the source exactly once, wherever that is, so it outlives a move of its file. One whose
text is gone is reported; write it anew for what has replaced that text.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """`old` replaced by `new` in the one file of the source that has it. `tests` are names of files of tests, without
    `test_` and `.py`, of which one has to fail, in `make test` or else in `make thorough`."""

    area: str
    what: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.area}: {self.what}"


def _of(area: str, *faults: tuple[str, str, str, str]) -> tuple[Fault, ...]:
    """Faults of one area, each `(what, old, new, names of tests)`."""
    return tuple(Fault(area, what, old, new, tuple(tests.split())) for what, old, new, tests in faults)


EXECUTOR = _of(
    "executor",
    (
        "a gather does not put this rank's part into the buffer",
        "allocate_full()\n            self._place(source, shard)",
        "allocate_full()",
        "presets",
    ),
    (
        "a gather over several axes begins with the wrong one",
        "for other in reversed(flat.spec.table.order):",
        "for other in flat.spec.table.order:",
        "presets values_after_forward",
    ),
    (
        "what was held of a buffer stays when it is whole",
        "self.flat.state = READY\n            self.flat.free_held()",
        "self.flat.state = READY",
        "presets custom_tables",
    ),
    (
        "every rank keeps the first part of a sum",
        "reduction.finish(reduction.current.chunk(len(group.ranks))[group.index].clone())",
        "reduction.finish(reduction.current.chunk(len(group.ranks))[0].clone())",
        "presets custom_tables",
    ),
    (
        "a sum is written to the first rank's part of its source",
        "out = source[group.index * numel : (group.index + 1) * numel]",
        "out = source[:numel]",
        "presets custom_tables",
    ),
    (
        "a rank without a gradient gives ones",
        "source = self.flat.grads.sum_memory(numel, dtype).zero_()",
        "source = self.flat.grads.sum_memory(numel, dtype).fill_(1)",
        "different_ways train_step frozen_parts models",
    ),
    (
        "memory of a reduction is not counted as given back",
        'self._meter.drop("working", self._staging_bytes + self._bytes)',
        'self._meter.drop("working", self._staging_bytes)',
        "presets",
    ),
    (
        "gradients that no_sync left are not reduced",
        "if self._passes.owes_reductions:",
        "if False:",
        "recovery",
    ),
    (
        "a micro-batch's gradient takes the place of those before it",
        "self._add(view, grad)\n",
        "view.copy_(grad)\n",
        "pipeline_schedule pipeline",
    ),
    (
        "a unit whose backward cannot be seen is freed after its forward",
        "if not (training and name in current.kept):",
        "if True:",
        "values_after_forward",
    ),
    (
        "gradients of a backward that raised stay",
        "        self.gathering.drop_gradients()\n",
        "",
        "recovery",
    ),
    (
        "a block that is to keep buffers frees them",
        "steps = self._steps if frees else self._keeping",
        "steps = self._steps",
        "values_after_forward",
    ),
    (
        "parameters are written while other ranks read them",
        "for shared_buffers in self._shared_buffers:\n            shared_buffers.open()",
        "for shared_buffers in ():\n            shared_buffers.open()",
        "shared_memory",
    ),
    (
        "a failed gather after an update is forgotten",
        "if self.flat.is_updating:\n                self.flat.fail_update(error)",
        "if False:\n                self.flat.fail_update(error)",
        "parameters_at_rest",
    ),
    (
        "gradients are not averaged over one of the axes",
        "            self._unweighed /= spec.mesh.size(axis)",
        "            self._unweighed = 1.0 / spec.mesh.size(axis)",
        "presets",
    ),
)

BUILDER = _of(
    "program",
    (
        "a unit that is needed next is freed all the same",
        'elif moment.phase == "backward" or not needs.is_next(index):',
        "else:",
        "golden program",
    ),
    (
        "what is whole at the end of a backward stays whole",
        "blocks.append(Block(END_OF_BACKWARD, gathered.drop_all(units)))",
        "blocks.append(Block(END_OF_BACKWARD, ()))",
        "golden program random_models",
    ),
    (
        "an all-reduce counts one round of messages",
        'rounds = 2 if move.verb == "all_reduce" else 1',
        "rounds = 1",
        "program golden presets",
    ),
    (
        "a resting buffer that is held whole is freed",
        "if flat.resident or (flat.table.held == flat.table.full and not _is_held_as_it_rests(flat)):",
        "if flat.resident:",
        "golden program presets",
    ),
    (
        "states are written to the disk before the update is cast",
        "return (fetch, update, *step_parameters(flat), evict)",
        "return (fetch, update, evict, *step_parameters(flat))",
        "golden program disk_params",
    ),
    (
        "matrices of the last flat buffer are not waited for",
        "    return due + returning",
        "    return due",
        "golden program optimizers",
    ),
    (
        "buffers are sent where there are none",
        "if axes and buffers_bytes:",
        "if axes:",
        "golden program",
    ),
    (
        "a buffer is gathered from where it rests though a range is held",
        "names = {flat.name for flat in missing}",
        "names = {flat.name for flat in missing}\n        self._held.clear()",
        "golden program presets custom_tables",
    ),
    (
        "gradients of a parameter that lies in shards are reduced once for all micro-batches",
        "return bool(self.table.grad.shard)",
        "return False",
        "whole_schedule program pipeline",
    ),
    (
        "what micro-batches of a pipeline add up takes the memory of what is sent",
        "return replace(place, dtype=wider(place.dtype, waits)) if are_added else place",
        "return place",
        "drawn_codes",
    ),
    (
        "backwards inside no_sync are added in the dtype that is sent",
        "dtype = self._added_dtype if self.are_left() else self._fresh_dtype",
        "dtype = self._fresh_dtype",
        "recovery",
    ),
    (
        "sums of gradients along an inner axis are made codes, too",
        "return replace(self, axes=self.axes[:1], only_outermost=False) if self.only_outermost else self",
        "return self",
        "code_formats explain",
    ),
    (
        "the norm of fp64 gradients is summed in fp32",
        'any("fp64" in (flat.table.grad.dtype, flat.table.optim.dtype) for flat in flats)',
        "False",
        "fp64 program",
    ),
    (
        "a program that leaves a gradient unreduced is accepted",
        "            state.end_computing(moment, reduces=reduces)",
        "            state.end_computing(moment, reduces=False)",
        "program",
    ),
    (
        "a step that leaves something out is accepted",
        "for left in wanted.values() if is_all else ():",
        "for left in ():",
        "program_order",
    ),
    (
        "a backward that was closed twice counts at its first end",
        "            elif moment.unit in closed:\n                continue",
        "            elif False:\n                continue",
        "merge different_ways",
    ),
)

STREAMS = _of(
    "streams",
    (
        "a gather goes beyond the budget of bytes",
        "full = ahead.last_above(home, budget_bytes - full_bytes[flat], last_use.get(flat, -1))",
        "full = ahead.last_above(home, budget_bytes, last_use.get(flat, -1))",
        "program",
    ),
    (
        "a gather passes the last use of its own buffer",
        "budget_bytes - full_bytes[flat], last_use.get(flat, -1))",
        "budget_bytes - full_bytes[flat], -1)",
        "program golden",
    ),
    (
        "nobody waits for a gather",
        "waits = [_wait(last, is_last=True) for last in _arriving(flying, block.moment)]",
        "waits = [_wait(last, is_last=True) for last in _arriving(flying, block.moment)][:0]",
        "program golden",
    ),
    (
        "reductions are not finished at the end of a backward",
        "ending = [flat for flat in pending if flat in chains or block.moment == END_OF_BACKWARD]",
        "ending = [flat for flat in pending if flat in chains]",
        "program golden",
    ),
    (
        "a sum over all flat buffers does not wait for the last",
        "if waiting and action.flat in (waiting.flat, ALL_FLATS):",
        "if waiting and action.flat == waiting.flat:",
        "program golden",
    ),
    (
        "every gather after a step is left to the next forward",
        "return not (block.moment == AFTER_STEP and is_last_wait and action.flat in behind)",
        "return not (block.moment == AFTER_STEP and is_last_wait)",
        "program golden presets",
    ),
    (
        "a reduction is not finished before its unit's next backward",
        "ending = [flat for flat in pending if opens in _possible_units(flat)]",
        "ending: list[str] = []",
        "program program_order whole_schedule",
    ),
    (
        "what is updated unit by unit is not drained after the step",
        'if block.moment.edge == "after" else []',
        'if block.moment.edge == "never" else []',
        "golden program",
    ),
    (
        "the budget is kept by one block too few",
        "middle, left_bytes = (low + high) // 2, limit_bytes - self._added[node]",
        "middle, left_bytes = (low + high) // 2, limit_bytes",
        "program",
    ),
)

MEMORY = _of(
    "memory",
    (
        "the cast of what is sent in another dtype takes nothing",
        "copies = 1 if content.dtype == wire.dtype else 2",
        "copies = 1",
        "program presets own_precision",
    ),
    (
        "a second micro-batch holds what the first does",
        "for _ in range(min(2, num_micro_batches)):",
        "for _ in range(1):",
        "program presets train_step micro_steps",
    ),
    (
        "micro-batches in flight hold nothing beside each other",
        "beside, heap = sum(alive.values()) + sent_bytes, sum(in_heap.values())",
        "beside, heap = sent_bytes, sum(in_heap.values())",
        "schedules rehearsal pipeline_memory",
    ),
    (
        "buffers for a disk are as many as there are units",
        "min(NUM_DISK_BUFFERS, len(updated))",
        "len(updated)",
        "program disk_tier tier_files explain placement",
    ),
    (
        "a frozen parameter has states",
        '        if not flat.trainable:\n            continue\n        if flat.tier_of("anchor") == tier:',
        '        if flat.tier_of("anchor") == tier:',
        "frozen_parts program frozen_offload adapters_by_hand",
    ),
)

WIRES = _of(
    "wire",
    (
        "a rank has its own part as it was before it was encoded",
        "            self._codec.decode(codes, elements)",
        "            if codes is not self._chunks[0]:\n                self._codec.decode(codes, elements)",
        "parameter_wires",
    ),
    (
        "messages cost what their elements take at rest",
        "return numel * WIDTH[self.dtype]",
        'return numel * WIDTH["fp32"]',
        "parameter_wires",
    ),
    (
        "codes are made of parameters that have been rounded already",
        "return master if part.numel() == master.numel() else None",
        "return None",
        "codes",
    ),
    (
        "a block begins wherever a parameter does",
        "return math.lcm(ALIGN, *(codes.block for codes",
        "return math.lcm(ALIGN, *(ALIGN for codes",
        "codes",
    ),
    (
        "an overflow is not seen in what arrives",
        "return largest.div_(largest.new_full((), self._largest))",
        "return largest.div_(self._largest).nan_to_num_(0.0, 1.0)",
        "codes",
    ),
    (
        "what is held is made codes again",
        "if codec is None or (is_held and self._codes is not None):",
        "if codec is None:",
        "codes",
    ),
    (
        "memory of codes is not counted as given back",
        'self._meter.drop("working", self._num_bytes)',
        "pass",
        "parameter_wires",
    ),
)

SCHEDULES = _of(
    "schedule",
    (
        "1F1B runs one forward too many ahead",
        "rows.append(_in_turn(forwards, backwards, num_ranks - rank - 1))",
        "rows.append(_in_turn(forwards, backwards, num_ranks - rank))",
        "schedules",
    ),
    (
        "the interleaved schedule warms up for too long",
        "ahead = (num_ranks - rank - 1) * 2 + (num_chunks - 1) * size",
        "ahead = (num_ranks - rank - 1) * 2 + num_chunks * size",
        "schedules",
    ),
    (
        "the interleaved schedule goes back from its first stage",
        'backwards = [Op("B", batch, (num_chunks - 1 - chunk) * num_ranks + rank) for chunk, batch in inside]',
        'backwards = [Op("B", batch, chunk * num_ranks + rank) for chunk, batch in inside]',
        "schedules",
    ),
    (
        "zero bubble holds as many micro-batches on the last rank as on the first",
        "ahead = min(num_ranks - rank, num_micro_batches)",
        "ahead = min(num_ranks, num_micro_batches)",
        "schedules",
    ),
    (
        "a backward does not wait for the next stage's",
        'after = [Op("B", batch, stage + 1)] if stage + 1 < schedule.num_stages else []',
        "after: list[Op] = []",
        "schedules",
    ),
    (
        "a schedule may run an op twice",
        "            if op in seen:\n",
        "            if False:\n",
        "schedules",
    ),
    (
        "the second half of a backward holds what the forward left",
        'now += {"F": 1, "B": -1, "I": 0, "W": -1}[op.kind]',
        'now += {"F": 1, "B": -1, "I": -1, "W": 0}[op.kind]',
        "schedules",
    ),
    (
        "micro-batches of different weight count alike in the mean loss",
        "if all(weight == weights[0] for weight in weights):\n        return (sum(losses[1:]",
        "if True:\n        return (sum(losses[1:]",
        "uneven_batches train_step",
    ),
    (
        "all micro-batches get the rows of the first",
        "return _Cut([_share(value, span, bounds[-1]) for span in spans], even_sizes(bounds[-1], num))",
        "return _Cut([_share(value, spans[0], bounds[-1]) for span in spans], even_sizes(bounds[-1], num))",
        "train_step pipeline",
    ),
)

DIAGNOSIS = _of(
    "diagnosis",
    (
        "half of the ranks are a majority",
        "has_majority = 2 * most > len(tags)",
        "has_majority = 2 * most >= len(tags)",
        "diagnosis",
    ),
    (
        "a rank that has begun what others wait for counts as late",
        "elif status.count(line) < number:",
        "elif status.count(line) <= number:",
        "diagnosis",
    ),
    (
        "any late rank may take as long as a disk",
        "is_moving = late is not None and late.on_disk and late.seconds <= timeout_seconds",
        "is_moving = late is not None and late.seconds <= timeout_seconds",
        "diagnosis slow_disk host_waits ended_ranks slow_ranks",
    ),
    (
        "whoever waits for a circle is counted to it",
        "return Circle(tuple(path[ranks_before.index(following.rank) :]))",
        "return Circle(tuple(path))",
        "diagnosis",
    ),
    (
        "a rank that raised inside of a collective is waited for",
        'return left + [status for status in self.entered if status.state == "raised"]',
        "return left",
        "diagnosis comm",
    ),
    (
        "the ranks' paths are compared from a moment that one has forgotten",
        "start = max(path.start for path in paths.values())",
        "start = min(path.start for path in paths.values())",
        "diagnosis",
    ),
    (
        "a silent rank is taken by its last report",
        "if silence(status.rank) > SILENT_SECONDS}",
        "if False}",
        "diagnosis",
    ),
    (
        "the last contradiction is named instead of the first",
        "number = min(clashes)",
        "number = max(clashes)",
        "diagnosis",
    ),
    (
        "paths of different passes are compared",
        "if len({(path.num_passes, path.part) for path in paths.values()}) != 1:",
        "if len({path.part for path in paths.values()}) != 1:",
        "diagnosis",
    ),
    (
        "an error at the same step on another rank is the code's",
        "if same_step and all(end.rank == first.rank for end in same_step):",
        "if same_step:",
        "causes",
    ),
    (
        "ranks that only report a fault are blamed for it",
        "return primary or asked or broken or left or ordered",
        "return ordered",
        "causes",
    ),
    (
        "two alike failures are the code's on any number of ranks",
        "return count > num_ranks // 2 and count == len(ends)",
        "return count == len(ends)",
        "causes",
    ),
    (
        "faults of long ago count",
        "self._before = [(at, end) for at, end in self._before if at > now - self.policy.seconds]",
        "self._before = list(self._before)",
        "causes",
    ),
)

CHECKPOINT = _of(
    "checkpoint",
    (
        "the first checkpoints are kept instead of the last",
        "set(steps[-self.last :])",
        "set(steps[: self.last])",
        "checkpoint_parts saving checkpoint",
    ),
    (
        "the best checkpoint is the one with the smallest metric, whatever was asked",
        "sign = -1 if self.largest else 1",
        "sign = 1",
        "checkpoint_parts saving",
    ),
    (
        "a damaged head is read",
        "if zlib.crc32(head) != file.head_crc32:",
        "if False:",
        "edited_checkpoints",
    ),
    (
        "damaged bytes are read",
        "            if not is_known:\n                _compare(portion, own)",
        "            if False:\n                _compare(portion, own)",
        "checkpoint_transfer checkpoint_parts checkpoint_faults",
    ),
    (
        "a file that has just been written counts as unchanged",
        "is_settled = found.st_ctime + SETTLED_SECONDS < time.time()",
        "is_settled = True",
        "checkpoint_transfer",
    ),
    (
        "a checkpoint without some of a tensor's elements is read",
        "        if missing:\n            raise CheckpointError(",
        "        if missing == span.numel + 1:\n            raise CheckpointError(",
        "checkpoint_parts",
    ),
    (
        "elements behind what a rank has are not asked for",
        "return [Span(span.start, common.start), Span(common.stop, span.stop)]",
        "return [Span(span.start, common.start)]",
        "reshard expert_reshard lost_ranks_states",
    ),
    (
        "every copy of what is kept is written",
        "return Span(kept.start + place * part, kept.start + (place + 1) * part)",
        "return kept",
        "checkpoint reshard checkpoint_parts",
    ),
    (
        "the rank behind the first along tp writes copies again",
        "if slot.box is not None and slot.box.place:",
        "if False:",
        "head_counts",
    ),
    (
        "a file of another size is read",
        "if num_bytes != file.num_bytes:",
        "if False:",
        "edited_checkpoints",
    ),
    (
        "whole states are written by ranks without their first element",
        "is_first = written.start == 0 and written.numel > 0 and (box is None or box.has_first)",
        "is_first = written.numel > 0",
        "checkpoint optimizers several_optimizers",
    ),
)

COLLECTIVES = _of(
    "collectives",
    (
        "a rounded sum is rounded on other ranks only",
        "        if one is not chunk:\n            chunk.copy_(one)",
        "        if False:\n            chunk.copy_(one)",
        "comm presets",
    ),
    (
        "the third rank's summand is left out",
        "for term in terms:",
        "for term in terms[:1]:",
        "comm presets",
    ),
    (
        "a message just too long for the short one is cut",
        "if max(lengths) > _SHORT_BYTES:",
        "if max(lengths) > SHORT_MESSAGE_BYTES:",
        "comm",
    ),
    (
        "an own summand in place is overwritten before its turn",
        "if out.data_ptr() == own.data_ptr() and group.index > 1:\n            own = own.clone()",
        "if False:\n            own = own.clone()",
        "comm shared_memory",
    ),
    (
        "parts of different sizes are concatenated with their padding",
        "whole = full.flatten(0, 1) if min(sizes) == longest else torch.cat(parts)",
        "whole = full.flatten(0, 1)",
        "comm",
    ),
    (
        "every rank takes as much of a sum as the first",
        "own = out.view(longest, *parts[0].shape[1:])[: sizes[self.index]]",
        "own = out.view(longest, *parts[0].shape[1:])[: sizes[0]]",
        "comm",
    ),
    (
        "a part of shared memory may be overwritten while others read it",
        "            self._fetch(chunks, group, entry.tag, full.dtype)\n            if is_lent:",
        "            self._fetch(chunks, group, entry.tag, full.dtype)\n            if False:",
        "comm shared_memory",
    ),
    (
        "a shared sum in bf16 is rounded on other ranks only",
        "            own.copy_(offered)  # what is sent is rounded, so all ranks keep the rounded sum",
        "            pass",
        "comm shared_memory presets",
    ),
    (
        "what is sent counts once however many receive it",
        "self.ledger.sent(verb, group.axis, len(group.others) * num_bytes)",
        "self.ledger.sent(verb, group.axis, num_bytes)",
        "comm",
    ),
    (
        "an odd vector is cut to a multiple of the ranks",
        "padded = vector.new_zeros(round_up(vector.numel(), num_ranks))",
        "padded = vector.new_zeros(max(vector.numel(), 1) // num_ranks * num_ranks)",
        "comm presets",
    ),
)

PRECISION = _of(
    "precision",
    (
        "gradients are clipped to less than was asked",
        "factor = max_norm / (float(norm) + 1e-6)",
        "factor = max_norm / (float(norm) + 1.0)",
        "presets fp16 train_step plain_loops",
    ),
    (
        "a norm that is no number leaves gradients as they are",
        "if factor < 1 or math.isnan(factor):",
        "if factor < 1:",
        "presets",
    ),
    (
        "copies along tp count several times in the norm",
        "own = own if copies == 1 else own / copies",
        "own = 1.0 * own",
        "tensor_parallel",
    ),
    (
        "of replicas each takes all squares, as if it were alone",
        "return [copies / num_shares for copies in copies_of_slots], (number, num_shares)",
        "return [copies / num_shares for copies in copies_of_slots], (0, 1)",
        "presets",
    ),
    (
        "a parameter that no rank reached is updated",
        "self._record(counts, list(map(bool, touched)))\n            return root(squared)",
        "self._record(counts, [True for _ in touched])\n            return root(squared)",
        "models frozen_parts different_ways optimizers",
    ),
    (
        "gradients that are left on other ranks are not noticed",
        "self.is_news, self.is_incomplete = counts >= _NEWS, counts % _NEWS > 0",
        "self.is_news, self.is_incomplete = counts >= _NEWS, False",
        "values_after_forward different_ways",
    ),
    (
        "a unit that stayed whole keeps the values from before the update",
        "flat.owes_free = flat.is_outdated = True",
        "flat.owes_free = True",
        "values_after_forward",
    ),
    (
        "the loss scale shrinks by two, not by half",
        "self.scale = max(self.scale / FACTOR, self.settings.minimum)",
        "self.scale = max(self.scale - FACTOR, self.settings.minimum)",
        "fp16",
    ),
    (
        "an overflow does not begin the count of good steps anew",
        "        self._good_steps = 0\n        if self._chances > 1:",
        "        if self._chances > 1:",
        "fp16",
    ),
    (
        "chances are not restored when the scale grows",
        "            self.scale *= FACTOR\n            self._chances = self.settings.hysteresis",
        "            self.scale *= FACTOR",
        "fp16",
    ),
    (
        "copies count several times in a norm of another type",
        "float(torch.linalg.vector_norm(due, norm_type, dtype=torch.float64)) ** norm_type / copies",
        "float(torch.linalg.vector_norm(due, norm_type, dtype=torch.float64)) ** norm_type",
        "fp16 presets plain_loops access deepspeed_calls rules exact_sums head_counts",
    ),
    (
        "whole numbers are cast with the inputs",
        "return value.to(dtype) if value.is_floating_point() else value",
        "return value.to(dtype)",
        "presets own_precision",
    ),
    (
        "the fastest rank decides whether bf16 is fast enough",
        "slowest = max(range(len(ratios)), key=ratios.__getitem__)",
        "slowest = min(range(len(ratios)), key=ratios.__getitem__)",
        "auto_precision",
    ),
    (
        "narrow gradients are squared in their own dtype",
        "squares = [torch.linalg.vector_norm(part.to(dtype)).square() for part in torch.split(due, numel)]",
        "squares = [torch.linalg.vector_norm(part).square().to(dtype) for part in torch.split(due, numel)]",
        "fp16",
    ),
)

ELASTIC = _of(
    "elastic",
    (
        "the oldest version of the state is returned to",
        "for version in sorted(common, reverse=True):",
        "for version in sorted(common):",
        "lost_states",
    ),
    (
        "an image without all of its state is taken for whole",
        "return self.shadow_version == version or (self.live_version == version and self.is_live_whole)",
        "return self.shadow_version == version or self.live_version == version",
        "lost_states",
    ),
    (
        "a state that is being updated can be returned to",
        "        self.await_copies()\n        self.image.live_version = TORN",
        "        self.await_copies()",
        "lost_ranks_states",
    ),
    (
        "values set by hand have the version of those before",
        "            iterations.next_version(iterations.made[iterations.version], self._sharded.progress.num_steps)\n",
        "",
        "lost_after_edits",
    ),
    (
        "states that are no tensors are not written to the image",
        "def _write_image(self, version: int) -> None:\n        self._write_numbers()",
        "def _write_image(self, version: int) -> None:",
        "lost_ranks_states",
    ),
    (
        "a host with most ranks gives its copies to itself",
        "if 2 * len(largest) <= len(order):",
        "if True:",
        "buddy_hosts",
    ),
    (
        "every rank needs a keeper",
        "return len({hosts[other] for other in same}) == 1",
        "return True",
        "buddy_hosts buddies",
    ),
    (
        "one reader reads for all lost ranks",
        "readers[rank] = able[rank % len(able)]",
        "readers[rank] = able[0]",
        "lost_states",
    ),
    (
        "a state counts as whole though a rank's part is gone",
        "return all({*parts.values()} <= {parts[rank] for rank in available if rank in parts} for parts in every)",
        "return True",
        "lost_states",
    ),
    (
        "copies of a rank that is lost during a recovery are not settled",
        "        for rank in mine:  # also",
        "        for rank in mine if layout.flats else ():  # also",
        "buddies",
    ),
    (
        "the elastic batch is one that fewer numbers of ranks can share",
        "if len(ranks) > len(best.ranks) or (is_tie and is_preferred):",
        "if len(ranks) >= len(best.ranks) or (is_tie and is_preferred):",
        "elastic_batches",
    ),
    (
        "a shuffle does not depend on the epoch",
        'keys(NUM_ROUNDS, "permutation", self.seed, self.source, self.epoch)',
        'keys(NUM_ROUNDS, "permutation", self.seed, self.source, 0)',
        "data_permutation data_sampling data_loader",
    ),
    (
        "the group that has lost most is filled up first",
        "key=lambda at: -len(broken[at])",
        "key=lambda at: len(broken[at])",
        "replica_groups",
    ),
    (
        "a spare takes a place of which it has no part, though its own is open",
        "for member, had in free.items() if had == place)",
        "for member, had in free.items())",
        "replica_groups",
    ),
    (
        "a group that has lost a rank goes on",
        "if len(group) == len(places)}",
        "if group}",
        "replica_groups",
    ),
    (
        "the rest of a group stays among the others",
        "for group in of_group.values() if len(group) == size for member in group}",
        "for group in of_group.values() for member in group}",
        "replica_groups rendezvous",
    ),
    (
        "one that waits alone is called in",
        "grows = len(self._going_on([process.number for process in living], coming).members) > len(living)",
        "grows = bool(coming)",
        "rendezvous",
    ),
    (
        "a stopped member is waited for if it has heard of the others' waiting",
        "if waits_long and self.is_stopped(one.number, one.pid)]",
        "if waits_long and one.heard[0] < self.generation and self.is_stopped(one.number, one.pid)]",
        "rendezvous",
    ),
    (
        "a spare takes itself for lost",
        "if not concerns_me and self._generation >= 0 and not self._is_spare:",
        "if not concerns_me and self._generation >= 0:",
        "rendezvous",
    ),
    (
        "what ranks of the same group have counts as a copy",
        "if axis not in shard and axis not in of_group)",
        "if axis not in shard)",
        "buddy_hosts",
    ),
    (
        "an image is read by a rank with another part of the model",
        "for reader, one in sources if self._has_same_part(reader, rank)]",
        "for reader, one in sources]",
        "lost_states lost_groups",
    ),
)


TENSOR = _of(
    "tensor",
    (
        "of ranks with unequal parts the first alone looks for a hard-coded number of heads",
        "return not line.index or any(own not in (whole, whole / line.num_ranks) for own, whole in sizes)",
        "return not line.index",
        "head_counts",
    ),
    (
        "of a survey that was interrupted a rank knows what others do not",
        "list(found)[min(numbers) :]",
        "list(found)[max(numbers) :]",
        "lost_stages",
    ),
    (
        "a stage beside others on its rank takes over what one alone has shown",
        "None if self._has_blocks_alone(pp_rank) else pp_rank",
        "None",
        "alike_stages",
    ),
    (
        "stages that stay where ranks are lost are surveyed again",
        "list(found)[min(numbers) :]:",
        "list(found):",
        "lost_stages",
    ),
    (
        "a call of which no block mixes samples carries nothing past the next stage",
        "self._surveys.carried.setdefault(form, found)",
        "self._surveys.carried.setdefault(form, NOTHING)",
        "calls_in_stages",
    ),
    (
        "what is left over of a dimension goes to no rank",
        "return part * least + min(part, more)",
        "return part * least",
        "even_parts",
    ),
    (
        "copies of a head are dealt in turn instead of to neighbours",
        "own_units = [Span(rank // copies, rank // copies + 1) for rank in range(num_ranks)]",
        "own_units = [Span(rank % units, rank % units + 1) for rank in range(num_ranks)]",
        "head_counts",
    ),
    (
        "a gradient is not summed over the ranks of a split layer",
        "return reduce_from(grad, ctx.line), None",
        "return grad, None",
        "tensor_parallel",
    ),
    (
        "the gradient of a replicated sum is summed again",
        "return copy_to(grad, ctx.line), None",
        "return reduce_from(grad, ctx.line), None",
        "tensor_parallel",
    ),
    (
        "the gradient of what all ranks use alike is summed over them",
        "return scatter_to(grad, *ctx.args), None, None, None",
        "return reduce_scatter_from(grad, *ctx.args), None, None, None",
        "tensor_parallel",
    ),
    (
        "split cross-entropy does not know the largest logit of other ranks",
        "largest = line.largest(logits.detach().amax(-1))",
        "largest = logits.detach().amax(-1)",
        "tensor_parallel cut_logits",
    ),
    (
        "a rank has a target that is another rank's word",
        "is_here = (words >= own.start) & (words < own.stop)",
        "is_here = (words >= own.start) & (words <= own.stop)",
        "tensor_parallel cut_logits",
    ),
    (
        "ignored targets count in the mean",
        "total / of_target.masked_fill(~is_counted, 0.0).sum()",
        "total / of_target.sum()",
        "tensor_parallel cut_logits",
    ),
    (
        "the vocabulary of cut logits stays where it was when rows are selected",
        "cut.at(cut.dim - (dim < cut.dim)))\n\n\ndef _select_backward",
        "cut.at(cut.dim))\n\n\ndef _select_backward",
        "cut_logits",
    ),
    (
        "a constant of the vocabulary's size is used whole with a part of the logits",
        "if isinstance(leaf, Tensor) and leaf.dim() >= -last and leaf.shape[last] == cut.size != 1:",
        "if False:",
        "cut_logits",
    ),
)

CONVERSIONS = _of(
    "conversions",
    (
        "the gradient of a batch's statistics is that of this rank's loss alone",
        "values = copy_to(reduce_from(values, line), line)",
        "values = reduce_from(values, line)",
        "conversions",
    ),
    (
        "after a change of plan modules sum along the former mesh",
        "    sharding.connect_converted(world)\n    renewed",
        "    renewed",
        "conversions",
    ),
    (
        "ranks at their own pace wait for each other's batch norms",
        "        self._connect(())\n        try:",
        "        try:",
        "conversions",
    ),
    (
        "losses of ranks with more rows count for no more than others",
        "communicates = sharding.experts is not None or self.converted.communicates",
        "communicates = sharding.experts is not None",
        "conversions",
    ),
)

CHUNKS = _of(
    "chunks",
    (
        "gradients of the head's weight are summed in its own dtype",
        "return torch.promote_types(param.dtype, torch.float32)\n\n    def add",
        "return param.dtype\n\n    def add",
        "chunked_logits",
    ),
    (
        "a head with dropout draws other masks in the backward",
        "ctx.random = _random_states(rows) if",
        "ctx.random = None if",
        "chunked_logits",
    ),
    (
        "rows that do not count add to the z-loss",
        ".square().masked_fill(words == ignore_index, 0.0)",
        ".square()",
        "chunked_logits",
    ),
    (
        "the input of a head that is split by words gets a part of its gradient",
        "            return copy_to(tensor, self.line)\n        return gather_to(",
        "            return tensor\n        return gather_to(",
        "chunked_logits",
    ),
    (
        "logits of the step before are computed with the head of this one",
        'return head.__dict__.get("num_updates", 0), *(param._version for param in head.parameters())',
        "return ()",
        "chunked_logits",
    ),
    (
        "softmax of logits that are not computed yet is left out",
        'return _put_off(logits, func, (logits,), {"dim": -1, "dtype": dtype})',
        "return logits",
        "chunked_logits",
    ),
)

BEGINNING = _of(
    "beginning",
    (
        "a world is closed though an engine still uses it",
        "for world, users in self._users.items() if not users]:",
        "for world, users in self._users.items()]:",
        "lightning_worlds",
    ),
    (
        "ranks with values of their own are taken to have the same",
        "return len(digests) == 1 and _OWN not in digests",
        "return len(digests) == 1",
        "deferred_init",
    ),
    (
        "ranks with values of their own compare nothing with others",
        '        digests = set(self._data_group.exchange(self._digest(), "first values"))',
        "        if self._digest() == _OWN:\n            return False\n"
        '        digests = set(self._data_group.exchange(self._digest(), "first values"))',
        "deferred_init",
    ),
    (
        "a worker that ends while it imports the script is like any other",
        "if not self._is_ready and code is not None and code >= 0:",
        "if False:",
        "data_workers",
    ),
)

ISLANDS = _of(
    "islands",
    (
        "outer gradients are added up and not averaged",
        "self._require().div_(self._num_islands)",
        "self._require()",
        "islands",
    ),
    (
        "an outer gradient has the other sign",
        "self._value.sub_(master.detach().to(flat.device))",
        "self._value.sub_(master.detach().to(flat.device)).neg_()",
        "islands",
    ),
    (
        "the share of its own values that an island keeps is the other share",
        "master.lerp_(anchor.to(master.device), 1 - own)",
        "master.lerp_(anchor.to(master.device), own)",
        "islands",
    ),
    (
        "outer gradients on their way are not part of a checkpoint",
        "        sharded.settle_islands()\n        check_same_settings",
        "        check_same_settings",
        "islands",
    ),
    (
        "an outer step that had begun is forgotten by a resume",
        'saved.get("pending") if is_same else None',
        "None",
        "islands",
    ),
    (
        "a checkpoint has the first island's parameters for all",
        'kind=f"{ISLAND}.{island}.param"',
        'kind=f"{ISLAND}.0.param", written=NOTHING if island else entry.written',
        "islands",
    ),
    (
        "the norm is summed over islands",
        "return tuple(axis for axis in shared if axis != ISLAND_AXIS)",
        "return tuple(shared)",
        "islands",
    ),
    (
        "an island that joins gets parts of several",
        "if self._before.island_of(former) != self._islands[taker]:",
        "if False:",
        "lost_islands",
    ),
    (
        "an outer step that is undone has moved what islands have in common",
        "outside = _common_cells_of(flat)",
        "outside = []",
        "lost_islands",
    ),
    (
        "a step that an island leaves out does not count",
        "if parts.outer_steps is None:\n                return",
        "return",
        "islands",
    ),
    (
        "what is exported is what the first island has",
        "self.param_piece(index) if self.anchor is None else self.outer_pieces(index)[ANCHOR]",
        "self.param_piece(index)",
        "islands",
    ),
)

STAGE_TERMS = _of(
    "terms of stages",
    (
        "what was computed of some stages counts as the whole model's",
        "return self.stage.are_of_several(self.names)",
        "return False",
        "stage_terms",
    ),
    (
        "what was computed of one block counts as some stages'",
        "len({self.pieces[name] for name in names}) > 1 or",
        "len(names) > 1 or",
        "stage_terms",
    ),
    (
        "a number does not know of which parameter it is",
        "return NumberOfStage.of(result, args[0].mark) if is_value else result",
        "return result",
        "stage_terms",
    ),
    (
        "a tensor to which terms are added is not known as theirs",
        "if tensor is result and self._is_loss:\n                continue",
        "if tensor is result:\n                continue",
        "stage_terms",
    ),
    (
        "a tensor that is overwritten stays known as terms",
        "leaf.mark = leaf.mark._replace(names=frozenset())",
        "pass",
        "stage_terms",
    ),
    (
        "a copy of the model may be paired with others' parameters",
        "if len(owners) != 1:\n            continue",
        "continue",
        "stage_terms",
    ),
    (
        "a size that is asked for a write counts",
        "self._counted.discard(name)",
        "pass",
        "stage_terms",
    ),
    (
        "that values were taken is said for each parameter again",
        "return num_before < len(found) == len(self.trained)",
        "return len(found) == len(self.trained)",
        "stage_terms",
    ),
)

SEQUENCE = _of(
    "sequence",
    (
        "gradients of keys stay one rank behind their owner",
        "if ring.num_ranks > 1:\n                    grads",
        "if step < ring.num_ranks - 1:\n                    grads",
        "sequence_attention",
    ),
    (
        "keys that arrive in a ring are taken for those of the other neighbour",
        "self._layout.runs[(self._place - step) % self.num_ranks]",
        "self._layout.runs[(self._place + step) % self.num_ranks]",
        "sequence_attention sequence",
    ),
    (
        "padding is seen",
        "seen = seen & self.kept[:, None, keys.start : keys.stop]",
        "pass",
        "sequence_attention sequence_transformers",
    ),
    (
        "every rank counts all labels of the sequence",
        'batch["num_items_in_batch"] = float(num_counted) / self._line.num_ranks',
        'batch["num_items_in_batch"] = float(num_counted)',
        "sequence_transformers",
    ),
    (
        "a label is not that of the next token",
        'functional.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]',
        'batch["labels"]',
        "sequence_transformers",
    ),
    (
        "ranks of a sequence drop the same elements",
        "torch.manual_seed((seed + place) % 2**63)",
        "torch.manual_seed(seed % 2**63)",
        "sequence_batches",
    ),
    (
        "what is recomputed takes the batch that was split last",
        "sample = self._recomputed() if recomputed else self.sample",
        "sample = self.sample",
        "sequence_batches",
    ),
    (
        "a mean over other numbers of tokens counts as the whole's",
        "return len(set(self.by_rank)) <= 1",
        "return True",
        "sequence_parts",
    ),
)

STAGE_REHEARSAL = _of(
    "rehearsed stages",
    (
        "a stand-in that only a watched forward makes counts as work",
        "with nullcontext() if known is None else self.remaking(), torch.set_grad_enabled(needs_grad):",
        "with torch.set_grad_enabled(needs_grad):",
        "alike_stages",
    ),
    (
        "the stages after it do not know what a stage hands over",
        "return Found(held.handed_over, frozenset(held.wanted))",
        "return Found(None, frozenset(held.wanted))",
        "alike_stages pipeline_memory",
    ),
)

FAULTS: tuple[Fault, ...] = (
    *(*BEGINNING, *SCHEDULES, *STREAMS, *DIAGNOSIS, *BUILDER, *MEMORY, *WIRES, *CHECKPOINT),
    *(*COLLECTIVES, *PRECISION, *TENSOR, *ELASTIC, *EXECUTOR, *CONVERSIONS, *CHUNKS, *ISLANDS, *STAGE_TERMS, *SEQUENCE),
    *STAGE_REHEARSAL,
)
