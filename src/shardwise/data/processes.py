"""Worker processes: for transforms that are slow in Python itself, of which only one runs at a time in threads.

A process is spawned, never forked: a fork beside the threads of gloo, NCCL or CUDA may hang. It gets the source and
the transform once, then numbers of steps, and gives back batches whose tensors lie in shared memory.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from threading import Event
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from shardwise.data.indexed import IndexedFeed
from shardwise.data.prefetch import Abandoned, Task
from shardwise.data.recipe import Made, Place
from shardwise.errors import ConfigError, DataError

GLANCE_SECONDS = 0.1  # how long until somebody who waits for a batch sees that nobody wants it any more
END_SECONDS = 5.0  # what a process gets to end by itself, its pipe being closed


class Crew:
    """`num_workers` processes that make the steps of a feed. Whoever makes it closes it."""

    def __init__(self, feed: IndexedFeed, num_workers: int) -> None:
        self._workers: list[_Worker] = []
        try:
            for number in range(num_workers):
                self._workers.append(_Worker(feed, number))
        except BaseException:
            self.close()
            raise

    def tasks(self, steps: Iterable[int]) -> Iterator[Task[Made]]:
        """Asks for one step after the other, each when it is taken; its task waits for it.

        Tasks are run in their order. What an earlier call asked for and did not fetch is thrown away.
        """
        for worker in self._workers:
            worker.forget()
        for step in steps:
            worker = self._workers[step % len(self._workers)]
            worker.ask(step)
            yield partial(worker.answer, step)

    def close(self) -> None:
        """End all processes. May be called twice."""
        for worker in self._workers:
            worker.hang_up()
        for worker in self._workers:
            worker.end()


class _Worker:
    """One process, and the pipe to it. It answers in the order in which it was asked."""

    def __init__(self, feed: IndexedFeed, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._number = number
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, feed), name=f"shardwise-data-{number}", daemon=True
        )
        self._num_stale = 0
        self._num_asked = 0
        try:
            self._process.start()
        except (AttributeError, TypeError, ValueError, OSError) as error:  # what pickle raises, in all its versions
            raise ConfigError(
                f"The source, transform or collate function cannot be sent to a worker process: {error}. Define them "
                f"at the top of a module, with state that can be pickled, or let threads do the work: processes=False."
            ) from error
        finally:
            theirs.close()

    def ask(self, step: int) -> None:
        try:
            self._pipe.send(step)
        except OSError as error:
            raise self._death(step) from error
        self._num_asked += 1

    def answer(self, step: int, stop: Event) -> Made:
        """The batches of `step`. Raises `DataError` for what went wrong there, or if the process has died."""
        while True:
            while not self._pipe.poll(GLANCE_SECONDS):
                if stop.is_set():
                    raise Abandoned
            try:
                batches, letter, trace = self._pipe.recv()
            except (EOFError, OSError) as error:
                raise self._death(step) from error
            self._num_asked -= 1
            if self._num_stale == 0:
                break
            self._num_stale -= 1
        if letter is not None:
            failure = DataError(letter)
            failure.add_note(f"In worker process {self._number}:\n{trace}")
            raise failure
        return Made(batches, Place(step), Place(step + 1))

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


def _serve(pipe: Connection, feed: IndexedFeed) -> None:
    """The life of a worker process; it ends when the other end of `pipe` is closed, or its owner is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the owner decides
    torch.set_num_threads(1)
    while True:
        try:
            step = pipe.recv()
        except (EOFError, OSError):
            return
        answer = _made(feed, step)
        try:
            _send(pipe, answer)
        except OSError:  # nobody is there any more
            return


def _made(feed: IndexedFeed, step: int) -> tuple[Any, str | None, str]:
    try:
        return feed.make(step, Event()).batches, None, ""
    except DataError as error:
        return None, str(error), traceback.format_exc()


def _send(pipe: Connection, answer: tuple[Any, str | None, str]) -> None:
    try:
        pipe.send(answer)
    except (AttributeError, TypeError, ValueError) as error:
        letter = f"A batch cannot be sent from a worker process: {error}. Collate to tensors, numbers and text."
        pipe.send((None, letter, traceback.format_exc()))


def _how_it_ended(exit_code: int | None) -> str:
    if exit_code is None:
        return "closed its pipe"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    hints = {"SIGKILL": " (often: out of memory)", "SIGBUS": " (often: /dev/shm is full)"}
    return f"was killed by {name}{hints.get(name, '')}"
