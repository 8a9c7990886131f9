"""Worker processes, for transforms that are slow in Python itself and would hold the GIL in threads.

A process is spawned, never forked, because a fork beside the threads of gloo, NCCL or CUDA may hang. It receives the
source and the transform once, then step numbers, and returns batches.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from threading import Event

import torch

from shardwise.data.indexed import IndexedFeed
from shardwise.data.read_ahead import Abandoned, Task
from shardwise.data.recipe import Made, Place
from shardwise.data.sampling import Share
from shardwise.data.worker_wire import packed, unpacked
from shardwise.errors import ConfigError, DataError
from shardwise.system.fast_exit import skip_last_collection

POLL_SECONDS = 0.1  # how often a waiting thread checks whether its batch is still needed
CANNOT_PICKLE = (pickle.PicklingError, AttributeError, TypeError, ValueError)  # everything that pickle raises
END_SECONDS = 5.0  # time for a process to end after its pipe was closed
_READY = b""  # the first message of a worker


class WorkerProcesses:
    """`num_workers` processes that make the steps of a feed. The creator must close it."""

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
        """Requests `share` of one step after the other, each when its task is taken; the task waits for the result.

        Tasks must run in their order. Results that an earlier call requested and did not fetch are discarded.
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
        self.abandon()
        for worker in self._workers:
            worker.end()

    def abandon(self) -> None:
        """Let all processes end by themselves, and do not wait: for finalizers, as `abandon` in `read_ahead.py`."""
        for worker in self._workers:
            worker.close_pipe()


class _Worker:
    """One process, and the pipe to it. It answers requests in order."""

    def __init__(self, feed: bytes, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._number = number
        self._pipe, theirs = context.Pipe()
        name = f"shardwise-data-{number}"
        self._process = context.Process(target=_serve, args=(theirs, feed), name=name, daemon=True)
        self._is_ready = False
        """Whether it has come as far as `_serve`: until then it imports the main script."""
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
        """The batches of `step`. Raises `DataError` for an error there, or if the process has died."""
        while True:
            while not self._pipe.poll(POLL_SECONDS):
                if stop.is_set():
                    raise Abandoned
            try:
                message = self._pipe.recv_bytes()
            except (EOFError, OSError) as error:
                raise self._death(step) from error
            if message == _READY:
                self._is_ready = True
                continue
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
        """Discard the results of all requests so far."""
        self._num_stale = self._num_asked

    def close_pipe(self) -> None:
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
        code = self._process.exitcode
        what = f"Worker process {self._number} of the data loader {_how_it_ended(code)}"
        if not self._is_ready and code is not None and code >= 0:
            script = getattr(sys.modules["__main__"], "__file__", None) or "the main script"
            return DataError(
                f"{what} while it imported {script}, as spawned processes do to find what is defined there; what it "
                f"printed says why. What the script does, rather than defines, belongs under "
                f'`if __name__ == "__main__":`, so that it is not done again there. Threads (processes=False) do not '
                f"need this."
            )
        return DataError(
            f"{what} before it gave the batch of step {step}. The next iteration starts new ones, at the same step."
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
    """The main loop of a worker process; it ends when the other end of `pipe` is closed, or its owner is gone."""
    skip_last_collection()  # or the owner, which waits for its end, would take a second longer to end
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the owner handles it
    threading.Thread(target=_end_with_the_owner, name="shardwise-owner", daemon=True).start()
    torch.set_num_threads(1)
    maker = unpacked(feed)
    try:
        pipe.send_bytes(_READY)
        while True:
            step, share = pipe.recv()
            pipe.send_bytes(_answer(maker, step, share))
    except (EOFError, OSError):  # the owner is gone
        return


def _end_with_the_owner() -> None:
    """Exit when the owner is gone. Without this, the closed pipe is only noticed when the current batch is done."""
    owner = multiprocessing.parent_process()
    if owner is not None:
        owner.join()
        os._exit(1)


def _answer(feed: IndexedFeed, step: int, share: Share) -> bytes:
    """The batches of a share of `step`, or an error text and a traceback."""
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
