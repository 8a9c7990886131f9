"""Worker processes: for transforms that are slow in Python itself, of which only one runs at a time in threads.

A process is spawned, never forked: a fork beside the threads of gloo, NCCL or CUDA may hang. It gets the source and
the transform once, then numbers of steps, and gives back batches.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Iterable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from threading import Event

import torch

from shardwise.data.indexed import IndexedFeed
from shardwise.data.prefetch import Abandoned, Task
from shardwise.data.recipe import Made, Place
from shardwise.data.sampling import Share
from shardwise.data.wire import packed, unpacked
from shardwise.errors import ConfigError, DataError

GLANCE_SECONDS = 0.1  # how long until somebody who waits for a batch sees that nobody wants it any more
CANNOT_PICKLE = (pickle.PicklingError, AttributeError, TypeError, ValueError)  # what pickle raises, as it comes
END_SECONDS = 5.0  # what a process gets to end by itself, its pipe being closed


class WorkerProcesses:
    """`num_workers` processes that make the steps of a feed. Whoever makes it closes it."""

    def __init__(self, feed: IndexedFeed, num_workers: int) -> None:
        self._workers: list[_Worker] = []
        message = _packed_feed(feed)
        try:
            for number in range(num_workers):
                self._workers.append(_Worker(message, number))
        except BaseException:
            self.close()
            raise

    def tasks(self, steps: Iterable[int], share: Share) -> Iterator[Task[Made]]:
        """Asks for `share` of one step after the other, each when it is taken; its task waits for it.

        Tasks are run in their order. What an earlier call asked for and did not fetch is thrown away.
        """
        for worker in self._workers:
            worker.forget()
        for step in steps:
            worker = self._workers[step % len(self._workers)]
            worker.ask(step, share)
            yield partial(worker.answer, step, share)

    @property
    def is_whole(self) -> bool:
        """Whether all processes are alive."""
        return all(worker.is_alive for worker in self._workers)

    def close(self) -> None:
        """End all processes. May be called twice."""
        for worker in self._workers:
            worker.hang_up()
        for worker in self._workers:
            worker.end()


class _Worker:
    """One process, and the pipe to it. It answers in the order in which it was asked."""

    def __init__(self, feed: bytes, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._number = number
        self._pipe, theirs = context.Pipe()
        name = f"shardwise-data-{number}"
        self._process = context.Process(target=_serve, args=(theirs, feed), name=name, daemon=True)
        self._num_stale = 0
        self._num_asked = 0
        self._process.start()
        theirs.close()

    def ask(self, step: int, share: Share) -> None:
        try:
            self._pipe.send((step, share))
        except OSError as error:
            raise self._death(step) from error
        self._num_asked += 1

    def answer(self, step: int, share: Share, stop: Event) -> Made:
        """The batches of `step`. Raises `DataError` for what went wrong there, or if the process has died."""
        while True:
            while not self._pipe.poll(GLANCE_SECONDS):
                if stop.is_set():
                    raise Abandoned
            try:
                message = self._pipe.recv_bytes()
            except (EOFError, OSError) as error:
                raise self._death(step) from error
            self._num_asked -= 1
            if self._num_stale == 0:
                break
            self._num_stale -= 1
        batches, failure_text, trace = unpacked(message)
        if failure_text is not None:
            failure = DataError(failure_text)
            failure.add_note(f"In worker process {self._number}:\n{trace}")
            raise failure
        return Made(batches, share.counts, Place(step), Place(step + 1))

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def forget(self) -> None:
        """Nobody will fetch what has been asked for so far."""
        self._num_stale = self._num_asked

    def hang_up(self) -> None:
        self._pipe.close()

    def end(self) -> None:
        if self._process.pid is None:
            return
        self._process.join(END_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _death(self, step: int) -> DataError:
        self._process.join(END_SECONDS)
        return DataError(
            f"Worker process {self._number} of the data loader {_how_it_ended(self._process.exitcode)} before it gave "
            f"the batch of step {step}. The next iteration starts new ones, at the same step."
        )


def _packed_feed(feed: IndexedFeed) -> bytes:
    try:
        return packed(feed)
    except CANNOT_PICKLE as error:
        raise ConfigError(
            f"The source, transform or collate function cannot be sent to a worker process: {error}. Define them "
            f"at the top of a module, with state that can be pickled, or let threads do the work: processes=False."
        ) from error


def _serve(pipe: Connection, feed: bytes) -> None:
    """The life of a worker process; it ends when the other end of `pipe` is closed, or its owner is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the owner decides
    threading.Thread(target=_end_with_the_owner, name="shardwise-owner", daemon=True).start()
    torch.set_num_threads(1)
    maker = unpacked(feed)
    while True:
        try:
            step, share = pipe.recv()
            pipe.send_bytes(_answer(maker, step, share))
        except (EOFError, OSError):  # nobody is there any more
            return


def _end_with_the_owner() -> None:
    """Whatever is being made: nobody will fetch it. The pipe alone would tell once the batch is done."""
    owner = multiprocessing.parent_process()
    if owner is not None:
        owner.join()
        os._exit(1)


def _answer(feed: IndexedFeed, step: int, share: Share) -> bytes:
    """The batches of a share of `step`, or a failure_text and a traceback."""
    try:
        return packed((feed.make(step, share, Event()).batches, None, ""))
    except DataError as error:
        return packed((None, str(error), traceback.format_exc()))
    except CANNOT_PICKLE as error:
        failure_text = f"The batch of step {step} cannot be sent from its worker process: {error}. Collate to tensors."
        return packed((None, failure_text, traceback.format_exc()))


def _how_it_ended(exit_code: int | None) -> str:
    if exit_code is None:
        return "closed its pipe"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    return f"was killed by {name}{' (often: out of memory)' if name == 'SIGKILL' else ''}"
