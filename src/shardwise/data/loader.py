"""The loader: the batches of a run, from any step on."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, fields, replace
from functools import partial
from itertools import count, islice
from typing import Any

from shardwise.data.feeding import Ranks, feed_of, made_and_pinned, pinning_of, ranks_of
from shardwise.data.following import Following
from shardwise.data.indexed import IndexedFeed
from shardwise.data.processes import WorkerProcesses
from shardwise.data.read_ahead import abandon, run_ahead
from shardwise.data.recipe import Made, Place, Recipe
from shardwise.data.sampling import Draw, Share, check_numbers, check_rows, check_whole
from shardwise.data.settings import Samples, Workers, refuse_unknown
from shardwise.data.streaming import StreamFeed
from shardwise.data.to_device import Transfer
from shardwise.errors import ConfigError, StateError
from shardwise.system.data_ranks import HANDED_OUT, DataRanks, Part

_SAMPLES = Samples()
_MOST_NAMED = 8
"""Of the batches of a step, so many have their samples named."""


class Loader:
    """This rank's share of every batch of `batch_rows` rows, from the current step on.

    The batch of step N is a function of `seed` and N; with another number of ranks each gets other parts of the same
    batches. Loaders do not communicate.

    `source`       map-style (a length and an index), a `Mixture` of such, an iterable, or `from_iterable(...)`.
    `batch_rows`   rows of a step over all ranks and micro-batches; a multiple of the product of their numbers, or
                   with `world=engine.data_ranks` any number.
    `world`        `engine.data_ranks`: the loader follows the engine, whose ranks may become fewer or more. It hands
                   out the batches of a void step again, and weighs every row the same if ranks have different numbers
                   of them. Or a `World`, except in an elastic job, or `(rank, size)`: ranks that should see the same
                   rows pass the same pair.
                   Default: `RANK` and `WORLD_SIZE` as a launcher sets them, or those of MPI and Slurm, else one rank.
    `accumulate`   micro-batches in which a step is handed out, one after the other, as the plan's `accumulate`.
    `steps`        the step at which iteration ends. Default: the end of the current epoch, where the next iteration
                   continues; a mixture has no such end and goes on forever.
    `samples`      the order of samples, and how they become a batch: see `Samples`.
    `workers`      the readers that read ahead, and the device of batches: see `Workers`. A number means threads.

    All iterations share one position. Raises `ConfigError` for invalid arguments. Iteration raises `DataError` if the
    source, the transform or the collation fails, naming source and index, or if a worker process dies; the same step
    comes again in the next iteration. `close()`, or `with`, ends threads and processes.
    """

    def __init__(
        self,
        source: Any,
        *,
        batch_rows: int,
        seed: int = 0,
        world: Ranks | tuple[int, int] | None = None,
        accumulate: int = 1,
        steps: int | None = None,
        samples: Samples = _SAMPLES,
        workers: Workers | int = 1,
        **others: object,
    ) -> None:
        refuse_unknown(others)
        rank, size = ranks_of(world)
        engine = world.engine if isinstance(world, DataRanks) else None
        if engine is None:
            check_rows(batch_rows, size, accumulate)
        else:
            check_numbers(batch_rows, accumulate)
        _check_kinds(seed, steps, samples, workers)
        self._share = Share(rank, size, batch_rows, accumulate)
        self._following = Following(engine) if engine is not None else None
        self.batch_rows, self.accumulate, self.steps = batch_rows, accumulate, steps
        self.workers = workers if isinstance(workers, Workers) else Workers(workers)
        device = self.workers.device
        self._transfer = Transfer.to(device) if device is not None else None
        self._pinning = pinning_of(self._transfer, self.workers.pin)
        recipe = Recipe(seed, samples.transform, samples.collate)
        self._feed, self._rows_per_epoch, identity = feed_of(source, batch_rows, recipe, samples)
        self._identity: dict[str, Any] = {"seed": seed, "batch_rows": batch_rows, "tail": samples.tail, **identity}
        if self.workers.processes and isinstance(self._feed, StreamFeed):
            raise ConfigError(
                "A stream is read in order, by one reader, which is a thread: processes=True is for sources with an "
                "index. What is slow in a stream can run in processes of its own, such as a DataLoader's."
            )
        self._place = Place()
        self._ahead: Generator[Made, None, None] | None = None
        self._held: Made | None = None
        """The batch that has been made but not completely handed out."""
        self._processes: WorkerProcesses | None = None
        self._is_sought = self._stays = False
        if self._following is not None:
            self._following.attend(self)

    # -- where the run is -------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Which of `size` parts of every batch this loader hands out."""
        return self._share.rank

    @property
    def size(self) -> int:
        return self._share.size

    @property
    def step(self) -> int:
        """The step of the next batch, which is also the number of steps handed out completely since the run began."""
        return self._place.step

    @property
    def epoch(self) -> int:
        """The epoch of the first row of the next batch; for a stream, the epoch in which it was last read."""
        if self._rows_per_epoch is not None:
            return self.step * self.batch_rows // self._rows_per_epoch
        return self._place.epoch

    def seek(self, step: int) -> None:
        """Continue with the batch of `step`, at no cost. A stream can only go back to step 0 (else `StateError`)."""
        if step < 0:
            raise ConfigError(f"Steps count from 0; there is no step {step}.")
        if step and isinstance(self._feed, StreamFeed):
            raise StateError("A stream can only go where it has been before: load_state_dict(state) instead of seek.")
        self._is_sought = True
        self._go_to(Place(step))

    def state_dict(self) -> dict[str, Any]:
        """The position of the run, for `engine.save(state=...)`: a few numbers, JSON, the same on every rank.

        Batches read ahead but not handed out count as not read, and so does a step with micro-batches still to come.
        """
        return {**asdict(self._place), "identity": dict(self._identity)}

    def state_after(self, num_steps: int) -> dict[str, Any]:
        """For `go_where` on a joining rank, once the engine has taken `num_steps` steps."""
        assert self._following is not None
        return {"now": self.state_dict(), "since": self._following.since(num_steps)}

    @property
    def can_leave_out(self) -> bool:
        """False for a stream, because the place after a batch is only known when the batch was read."""
        return not isinstance(self._feed, StreamFeed)

    def leave_out(self, num_steps: int) -> None:
        """See `Reader`; the engine calls this if the plan has `bad_batch: skip`."""
        if self._following is not None:
            self._following.leave_out(num_steps)

    def is_like(self, state: Mapping[str, Any]) -> bool:
        """Whether it is the `state_after` of a loader with the same batches."""
        return bool(state["now"]["identity"] == self._identity)

    def go_where(self, state: Mapping[str, Any]) -> None:
        """Load the `state_after` of another rank, unless `seek` was called."""
        if not self._is_sought and self._following is not None:
            self._go_to(self._place_of(state["now"]))  # perhaps to go back from there, so it need not be reachable
            self._following.go_on(state["since"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, on any number of ranks, with any `accumulate` and workers.

        Raises `ConfigError` if the batches would differ from those of the run that saved the state, and `StateError`
        for a stream that cannot go there; then nothing has been changed.
        """
        place = self._place_of(state)
        if isinstance(self._feed, StreamFeed):
            self._feed.check_reachable(place)
        self._go_to(place)

    @contextmanager
    def staying(self) -> Iterator[None]:
        """Inside, it stays where it is, whatever it is given to load."""
        self._stays = True
        try:
            yield
        finally:
            self._stays = False

    def _go_to(self, place: Place) -> None:
        if self._stays:
            return
        self._stop_reading()
        self._place = place
        if self._following is not None:
            self._following.forget()

    def draw(self, step: int) -> Draw:
        """The samples of the whole batch of `step`, on all ranks; for finding what was in a bad batch."""
        if isinstance(self._feed, StreamFeed):
            raise StateError("Which samples of a stream are in a batch is known only when it is read.")
        return self._feed.sampler.batch(step)

    def named(self, steps: range, part: Part | None = None) -> str:
        """This rank's samples in the batches of `steps`, as text: all, or those of a micro-batch of a step whose last
        one was of the last batch."""
        rows, step = self._share.read, steps[-1]
        if part is not None and sum(part.rows) == len(rows):
            first = sum(part.rows[: part.number])
            rows = rows[first : first + part.rows[part.number]] or rows[:1]
        elif part is not None and not part.rows and self.accumulate == part.of:
            rows = rows[self._share.parts[part.number]]
        elif part is not None and not part.rows and self.accumulate == 1:
            step -= part.of - 1 - part.number
        steps = steps if part is None else range(step, step + 1)
        which = f"batch of step {step}" if len(steps) == 1 else f"batches of steps {steps[0]} to {steps[-1]}"
        where = f"rows {rows.start} to {rows.stop - 1} of the {which}"
        if isinstance(self._feed, StreamFeed) or len(steps) > _MOST_NAMED:
            return f"it had {where}"
        return f"it had {'; '.join(self._feed.names(one, rows) for one in steps)}, {where}"

    def _place_of(self, state: Mapping[str, Any]) -> Place:
        known = {field.name for field in fields(Place)}
        if not isinstance(state, Mapping):
            raise ConfigError(
                f"This is not the state of a data loader, but {state!r:.60}. Give what state_dict() returned."
            )
        if state.keys() != {*known, "identity"}:
            raise ConfigError(
                f"This is not the state of a data loader: it has the keys {sorted(map(str, state))}. "
                f"Give what state_dict() returned."
            )
        theirs = state["identity"]
        for name in sorted({*theirs, *self._identity}):
            was, now = theirs.get(name), self._identity.get(name)
            if was != now:
                raise ConfigError(
                    f"The state is of a loader with {name}={was!r}, this one has {now!r}, so the batches to come "
                    f"would not be those of that run. Give what it was, or begin without the state."
                )
        return Place(**{name: state[name] for name in known})

    # -- batches ----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """The number of batches of an iteration from step 0 to `steps`, or over the current epoch; micro-batches
        count."""
        if self.steps is not None:
            return self.steps * self.accumulate
        if self._rows_per_epoch is None:
            raise TypeError("A mixture or a stream has no length; give the loader steps=.")
        return (self._first_step(self.epoch + 1) - self._first_step(self.epoch)) * self.accumulate

    def __iter__(self) -> Iterator[Any]:
        """Batches from the current step on; the micro-batches of a step one by one."""
        if self._following is not None:
            self._following.begin_to_read()  # which may move it to another epoch
        end = self._end()
        epoch: int | None = None
        while True:
            self._follow()
            if end is not None and self.step >= end:
                return
            with self._following.reading() if self._following is not None else nullcontext():
                made = self._next()
            epoch = made.before.epoch if epoch is None else epoch
            if self.steps is None and made.before.epoch != epoch:
                self._place = made.before  # only now is it known that the stream's epoch has ended
                return
            HANDED_OUT.note(self, made.before.step)
            self._is_sought = False  # if this rank was a spare when it reads again, it goes where the others are
            if self._following is not None:
                self._following.begin(made)
            for batch, num_rows in zip(made.batches[:-1], made.counts, strict=False):
                yield self._handed_out(batch, num_rows)
                self._follow()
                if self._held is not made:
                    break  # the position was changed meanwhile
            else:
                self._place, self._held = made.after, None
                yield self._handed_out(made.batches[-1], made.counts[-1])

    def _follow(self) -> None:
        """Take the current share from the followed engine, if any, and go back to batches that come again."""
        following = self._following
        if following is None:
            return
        following.begin_to_read()
        back = Place(self.step + 1) if following.passes_over() else following.again()
        if back is not None:
            if isinstance(self._feed, StreamFeed):
                self._feed.check_reachable(back)
            self._stop_reading()
            self._place = back
        rank, size = following.ranks
        if (rank, size) != (self.rank, self.size):
            self._stop_reading()
            self._share = replace(self._share, rank=rank, size=size)

    def _handed_out(self, batch: Any, num_rows: int) -> Any:
        if self._following is not None:
            self._following.weigh(self._share, num_rows)
        return self._transfer.moved(batch) if self._transfer is not None else batch

    def close(self) -> None:
        """Stop reading ahead. May be called twice; iterating again is allowed."""
        self._stop_reading()
        if self._processes is not None:
            self._abandon_processes.detach()
            self._processes.close()
            self._processes = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- reading ahead ----------------------------------------------------------------------------------

    def _next(self) -> Made:
        """The batch at the current place, which stays the next one until it is completely handed out."""
        if self._held is None:
            if self._ahead is None:
                self._ahead = self._start_reading()
                # also runs at the end of a script, while what threads need in order to end still exists
                self._end_reading = weakref.finalize(self, abandon, self._ahead)
            try:
                self._held = next(self._ahead)
            except BaseException:  # the next iteration starts afresh at this place
                self._stop_reading()
                if self._processes is not None and not self._processes.is_whole:
                    self.close()
                raise
        return self._held

    def _start_reading(self) -> Generator[Made, None, None]:
        if isinstance(self._feed, StreamFeed):
            self._feed.check_reachable(self._place)
        num_threads, tasks = self.workers.number, self._feed.tasks(self._place, self._share)
        if self.workers.processes:
            num_threads, tasks = 1, self._worker_processes().tasks(count(self.step), self._share)
        elif isinstance(self._feed, StreamFeed):
            num_threads = min(1, self.workers.number)
        if self.steps is not None:
            tasks = islice(tasks, self.steps - self.step)
        if self._pinning is not None:
            tasks = (partial(made_and_pinned, task, self._pinning) for task in tasks)
        return run_ahead(tasks, num_threads, self.workers.num_ahead)

    def _worker_processes(self) -> WorkerProcesses:
        """The worker processes, started on first use."""
        if self._processes is None:
            assert isinstance(self._feed, IndexedFeed)
            self._processes = WorkerProcesses(self._feed, self.workers.number)
            self._abandon_processes = weakref.finalize(self, self._processes.abandon)
        return self._processes

    def _stop_reading(self) -> None:
        if self._ahead is not None:
            self._end_reading.detach()
            self._ahead.close()
        self._ahead = self._held = None

    def _end(self) -> int | None:
        """The step at which to stop, if known: `steps`, or the first step of the next epoch."""
        if self.steps is not None or self._rows_per_epoch is None:
            return self.steps
        return self._first_step(self.epoch + 1)

    def _first_step(self, epoch: int) -> int:
        """The first step whose first row is in `epoch` or later."""
        assert self._rows_per_epoch is not None
        return -(-epoch * self._rows_per_epoch // self.batch_rows)


def _check_kinds(seed: object, steps: object, samples: object, workers: object) -> None:
    """Raise `ConfigError` for arguments of another kind, before they are a `TypeError` of what uses them."""
    check_whole("seed", seed, "which determines the order of samples")
    if steps is not None:
        check_whole("steps", steps, "counted from the beginning of the run", least=0)
    if not isinstance(samples, Samples):
        raise ConfigError(f"samples is {samples!r:.60}; give sw.data.Samples(shuffle=..., transform=...).")
    if not isinstance(workers, Workers):
        check_whole("workers", workers, "of threads, or sw.data.Workers(...)")
