"""What this rank is doing, in a few plain attributes that another thread may read at any time.

[Note: tags] Along each line of ranks a tag is carried from collective to collective: a checksum of every collective
that this rank has entered there, by verb, subject, dtype and length. Two ranks whose histories agree have equal tags,
and two that disagreed once never have equal tags again. Messages between ranks carry the tag, so that two different
messages cannot be matched however alike they look; and the watchdog compares tags to distinguish a rank that
contradicts the others from one that is merely late.

The name of a collective in errors (moment and action) is not part of the tag: a rank that left the recorded order, and
gathers just in time what others gather ahead, still sends the same messages.

What sends nothing by itself but has to be the same on all ranks can be marked (`Journal.mark`). A mark enters the tags
of everything that this rank enters afterwards, along any line, so that the next collective exposes a rank that has not
done the same.

[Note: links] A message from one stage of a pipeline to the next is entered by two ranks only, each at another point of
its own step: one of them may have run more backwards by then, and marks have no common order with it. So neither enters
the tags of a link, which depend on its own messages alone.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from shardwise.comm.group import Group
from shardwise.comm.watch.fault import Fault
from shardwise.comm.watch.status import Entered, PassPath, Status, Track
from shardwise.comm.work import LinkError, Work
from shardwise.errors import CommError, StateError
from shardwise.program import Action, Moment
from shardwise.system.printable import printable
from shardwise.system.telemetry import StepClock
from shardwise.system.whose_code import whose

NUM_REMEMBERED = 32
_NUM_MOMENTS = 64
_NUM_MARKS = 64
"""How many of the marks between two collectives are reported."""
_NUM_MARKED = 4
"""For how many collectives: reports go out twice a second."""
FIRST_SIDE_TAG = 2**30
"""Tags from here on are those of `comm/transport/side_channel.py`. gloo's tags are not negative, and have 32 bits."""
_TAGS = FIRST_SIDE_TAG - 1
_WORDS = "CALLED_BY_TORCH"
"""A module with this name says in words what its functions are about that torch calls, and no user knows by name."""
_CLOSED = "closed"
_FORKED = "forked"
_FRAMES_LOCK = threading.Lock()
_Kind = tuple[str, str, torch.dtype]
# One per collective: number, tag, action, its name if there is no action, length, backwards, marks, verb and subject.
_Record = tuple[int, int, Action | None, str, int, int, tuple[str, ...], _Kind]


class LineRecord:
    """What this rank has entered along one line of ranks."""

    __slots__ = ("axis", "count", "name", "num_marks", "ranks", "recent", "reported", "tag")

    def __init__(self, group: Group) -> None:
        self.axis = group.axis
        self.ranks = group.ranks
        self.name = group.name
        self.count = self.num_marks = 0
        self.tag = zlib.crc32(group.name.encode()) & _TAGS
        self.recent: deque[_Record] = deque(maxlen=NUM_REMEMBERED)
        self.reported = Track(0)
        """What the watchdog has said of it last. A rank that waits need not be described anew again and again."""


@dataclass(eq=False, slots=True)
class Entry:
    """One collective of one line, by its number."""

    line: LineRecord
    number: int
    tag: int


class Journal:
    """Written by the computing thread, read by the watchdog. Nothing here locks, blocks or communicates."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.moment: Moment | None = None
        """The moment of the program that was reached last."""
        self.action: Action | None = None
        """The action that is running; `None` between two moments."""
        self.num_backwards = 0
        """Backwards since the last optimizer step. Part of the tag, because where gradients wait on their own rank
        until the step a missing backward would go unnoticed."""
        self.part = ""
        """This rank's part of a model whose parts are on different ranks, such as stages of a pipeline."""
        self.num_steps = 0
        """Optimizer steps that were taken in this world."""
        self.before: Callable[[str], bool] | None = None
        """Called before each action of a program, and each collective, with its words: "gather h.0 param dp bf16" or
        "exchange of barrier". It may raise, or end the process; if it returns true, an action is left out. Only tests
        set it: see `shardwise.testing.plant`."""
        self.error = ""
        """The exception that ended the last forward early, in words."""
        self.clock = StepClock()
        """How long this rank has waited for others, and what else it does."""
        self.waiting: Entry | None = None
        self.device_wait: Callable[[], Entry | None] | None = None
        """Asks the device what it waits for; the host does not know where kernels wait for each other."""
        self.fault: Fault | None = None
        """What went wrong. Once it is set, nothing more can be sent."""
        self.explain: Callable[[LinkError], CommError] | None = None
        """Finds out why a link broke; blocks while it asks the other ranks."""
        self.is_elastic = False
        """Whether the ranks may go on in a new world after a fault, which is then met where something is sent; what
        the fault says ends with that."""
        self._raised_at = ""
        """The user's line at which the fault was raised first. If it is raised again, the loop has caught it there."""
        self._thread_id = threading.get_ident()
        self._call = ""
        """The library function that runs a whole schedule; see `calling`."""
        self._place: tuple[str, str] | None = None
        """Where this rank is, while its frames are not to be read: see `unobserved`."""
        self._lines: dict[str, LineRecord] = {}
        """By the name of the group, which identifies its ranks."""
        self._codes: dict[_Kind, int] = {}
        self._num_disk_waits = 0
        """What the clock had counted when this rank entered its last collective."""
        self._trace: list[Moment] = []
        self._num_passes = 0
        self._reported_path = PassPath()
        """As `LineRecord.reported`."""
        self._marks: deque[str] = deque(maxlen=_NUM_MARKS)
        self._num_marks = self._marked = self._marked_of_part = 0
        self.whole_model_axes: frozenset[str] = frozenset()
        """Axes along which ranks have different parts of the model. Marks that concern one part, and the number of
        backwards, do not enter the tags along them."""
        _JOURNALS.add(self)

    # -- what the computing thread calls ----------------------------------------------------------------

    def enter(self, verb: str, group: Group, numel: int, dtype: torch.dtype, subject: str) -> Entry:
        """Record that this rank starts a collective, and give it its tag.

        `subject` says what it is about, such as the name of a flat buffer: the same on all ranks. Raises `FaultError`
        after a fault, and `StateError` once this rank's world is closed.
        """
        if self.before is not None:
            self.before(f"{verb} of {subject}")
        if self.fault is not None:
            raise self._refusal(self.fault)
        line = self._lines.get(group.name)
        if line is None:
            line = self._lines[group.name] = LineRecord(group)
        action = self.action
        call = ""
        if action is None:
            call = (self._call if group.is_link else "") or _outwards(sys._getframe(1))[0]
        kind = (verb, subject, dtype)
        code = self._codes.get(kind)
        if code is None:
            code = self._codes[kind] = zlib.crc32(f"{verb} {subject} {dtype}".encode())
        number = line.count + 1
        marked = self._marked
        marks: tuple[str, ...] = ()
        if group.is_link:  # see [Note: links]
            marked = 0
        elif line.axis not in self.whole_model_axes:
            marked += self._marked_of_part + self.num_backwards * 7_919
        tag = (line.tag * 1_000_003 + code + numel + marked) & _TAGS
        if line.num_marks != self._num_marks and not group.is_link:
            marks = self._marks_since(line)
        line.recent.append((number, tag, action, call, numel, self.num_backwards, marks, kind))
        line.tag, line.count = tag, number
        self._num_disk_waits = self.clock.num_disk_waits
        return Entry(line, number, tag)

    def check(self, *, when_closed: bool = True) -> None:
        """Raise what `enter` would, `when_closed` also if only the world was closed. Call it before using what has come
        from a device.

        [Note: garbage after a fault] A device that waits for another rank is woken by an abort, and then returns
        undefined values. The fault is recorded before anything is aborted, so checking after the host has read is
        enough.
        """
        if self.fault is not None and (when_closed or self.fault.kind != _CLOSED):
            raise self._refusal(self.fault)

    def mark(self, what: str, *, is_of_part: bool = False) -> None:
        """Put `what` (a few words, shown in errors) into this rank's history. Nothing is sent.

        From now on collectives of ranks that have marked different things, or in another order, contradict each other;
        with `is_of_part` only among ranks that have the same part of the model.
        """
        if is_of_part:
            self._marked_of_part = zlib.crc32(what.encode(), self._marked_of_part)
        else:
            self._marked = zlib.crc32(what.encode(), self._marked)
        self._marks.append(what)
        self._num_marks += 1

    def forget_part(self) -> None:
        """Another engine begins, perhaps with other parts: what was marked of the former ones is no contradiction. All
        ranks call."""
        self._marked_of_part = 0

    def _marks_since(self, line: LineRecord) -> tuple[str, ...]:
        """What was marked since the last collective of `line`, as far as it is remembered."""
        num_new, line.num_marks = self._num_marks - line.num_marks, self._num_marks
        return tuple(self._marks)[-num_new:]

    def note(self, error: BaseException | None) -> None:
        """A forward raised. The user's code may catch that and go on; if the other ranks did not raise, they have to
        know."""
        self.error = in_words(error) if error is not None else ""

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Inside `with`, messages along links are all of the call in which this rank is now. To find that for each
        takes as long as to send a small one."""
        self._call = _outwards(sys._getframe())[0]
        try:
            yield
        finally:
            self._call = ""

    @contextlib.contextmanager
    def unobserved(self) -> Iterator[None]:
        """Inside `with`, the watchdog does not read the frames of this thread, but reports it to be where it is now.
        For code that counts live bytes: whoever reads a frame keeps its variables, and tensors would be freed later."""
        self._place = _outwards_in_words(sys._getframe())
        try:
            yield
        finally:
            self._place = None

    def close(self) -> None:
        """Refuse to send anything from here on. An earlier fault stays the reason."""
        if self.fault is None:
            self.fault = Fault(_CLOSED, (self.rank,), "")

    def _refusal(self, fault: Fault) -> CommError | StateError:
        if fault.kind == _FORKED:
            return StateError(
                f"This process was forked from rank {self.rank}, and is no rank itself: it has the rank's memory, but "
                f"not its threads, and what it sent would be taken for the rank's. Use the engine, and its model, in "
                f"the process that called shard(); give children plain tensors, such as engine.state_dict() has."
            )
        if fault.kind != _CLOSED:
            return self._again(fault.error())
        return StateError(
            f"The world of rank {self.rank} was closed, so nothing more can be sent to the other ranks. Call "
            f"world.close() after the last step, or leave its `with` then."
        )

    def _again(self, error: CommError) -> CommError:
        """`error`, which is about to be raised; if one was before, with where the script has caught that."""
        caught_at = self._raised_at
        self._raised_at = caught_at or _outwards_in_words(sys._getframe())[1] or "an unknown line"
        if caught_at and not self.is_elastic:
            error.args = (
                f"{error}\nThis was raised before, at {caught_at}, and the script went on without training: there, "
                "take out what catches it (such as `except Exception: continue`), or let `FaultError` through.",
            )
        return error

    def require_usable(self) -> None:
        """Raise the fault, if there is one, also where nothing would be sent: a loop that caught it must not go on with
        computations that lead nowhere. Not in an elastic job, nor if only the world was closed."""
        is_met_later = self.is_elastic and self.fault is not None and self.fault.kind != _FORKED
        if self.fault is not None and not is_met_later and self.fault.kind != _CLOSED:
            raise self._refusal(self.fault)

    def begin_pass(self, trace: list[Moment]) -> None:
        """A pass over the model begins; its moments will be appended to `trace`."""
        self._trace = trace
        self._num_passes += 1

    def failure(self, error: LinkError) -> CommError:
        """The error to raise for a broken link: the fault, if there is one or one is found soon."""
        if self.fault is not None and self.fault.kind != _CLOSED:
            return self._again(self.fault.error())
        return self._again(self.explain(error)) if self.explain is not None else CommError(str(error))

    # -- what the watch calls ---------------------------------------------------------------------------

    def awaited(self) -> Entry | None:
        """The collective that this rank waits for."""
        if self.waiting is not None or self.device_wait is None:
            return self.waiting
        return self.device_wait()

    @property
    def has_others(self) -> bool:
        """Whether it has entered a collective with another rank."""
        return any(len(line.ranks) > 1 for line in self._lines.values())

    def ranks_of(self, line: str) -> tuple[int, ...]:
        return self._lines[line].ranks

    def progress(self) -> tuple[object, ...]:
        """A value that changes whenever this rank has done something."""
        counts = (line.count for line in tuple(self._lines.values()))
        return (self.moment, self.action, self.awaited(), self.clock.num_disk_calls, *counts)

    def status(self, beat: int, seconds: float) -> Status:
        """The report for the other ranks. `seconds`: for how long nothing has changed."""
        entry = self.awaited()
        call, place = self._place or _where(self._thread_id)
        action, moment = self.action, self.moment
        if entry is not None:
            records = tuple(entry.line.recent)
            action = next((awaited for number, _, awaited, *_ in records if number == entry.number), None)
        return Status(
            rank=self.rank,
            beat=beat,
            state="computing" if entry is None else "waiting",
            moment=str(moment or ""),
            unit=moment.unit if moment is not None else "",
            doing=str(action or ""),
            call=call,
            place=place,
            seconds=seconds,
            error=self.error,
            on_disk=entry is None and (self.clock.is_on_disk or self.clock.num_disk_waits > self._num_disk_waits),
            awaited=(entry.line.name, entry.number, entry.line.ranks) if entry is not None else None,
            tracks={line.name: _track(line) for line in tuple(self._lines.values())},
            path=self._path(),
        )

    def _path(self) -> PassPath:
        trace, num_passes = self._trace, self._num_passes
        end = len(trace)
        reported = self._reported_path
        if (reported.num_passes, reported.start + len(reported.moments), reported.part) != (num_passes, end, self.part):
            start = max(0, end - _NUM_MOMENTS)
            moments = tuple((str(moment), moment.unit) for moment in trace[start:end])
            self._reported_path = PassPath(num_passes, start, moments, self.part)
        return self._reported_path


def in_words(error: BaseException) -> str:
    """For example `ValueError: a bad batch`. Other ranks print it."""
    try:
        text = str(error).strip().partition("\n")[0]
    except Exception:  # the user's own class may fail in any way; in the words of Python's tracebacks
        text = "<exception str() failed>"
    return printable(f"{type(error).__name__}: {text}" if text else type(error).__name__)


class Awaited:
    """Records in the journal that this rank waits, while it does."""

    __slots__ = ("_entry", "_journal", "_work")

    def __init__(self, journal: Journal, entry: Entry, work: Work) -> None:
        self._journal = journal
        self._entry = entry
        self._work = work

    def wait(self) -> None:
        journal = self._journal
        journal.waiting = self._entry
        started = journal.clock.now()
        try:
            self._work.wait()
        except LinkError as error:
            raise journal.failure(error) from error
        finally:
            journal.waiting = None
            journal.clock.wait(self._entry.line.axis, journal.clock.now() - started)


def _track(line: LineRecord) -> Track:
    count = line.count
    if line.reported.count != count:
        records = tuple(line.recent)
        line.reported = Track(
            count,
            tuple(
                Entered(
                    number,
                    tag,
                    f"'{action}'" if action is not None else call,
                    numel,
                    num_backwards,
                    marks if number > count - _NUM_MARKED else (),
                    f"{kind[0]} of {kind[1]}" if action is None else "",
                )
                for number, tag, action, call, numel, num_backwards, marks, kind in records
            ),
        )
    return line.reported


def _outwards(frame: FrameType | None) -> tuple[str, FrameType | None]:
    """Walk from a frame outwards to the first one in the user's code. Returns the last library function on the way, as
    a call or in words, and that frame. See [Note: whose code] in `system/whose_code.py`.

    The way leads through torch where it calls us back (an optimizer's hooks).
    """
    last: FrameType | None = None
    while frame is not None:
        code = frame.f_code
        of_whom = whose(code.co_filename)
        if of_whom == "the user's":
            break
        if of_whom == "ours" and code.co_name != "<lambda>":
            last = frame
        frame = frame.f_back
    if last is None:
        return "", frame
    name = last.f_code.co_name
    words: str = last.f_globals.get(_WORDS, {}).get(name, f"{name}()")
    return words, frame


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Disable garbage collection while reading the frames of another thread.

    [Note: frames and garbage] The interpreter builds the list of frames under a lock that a new thread needs as well.
    If building it starts a garbage collection, the code that runs then may switch to a thread that waits for the lock,
    and the process hangs (CPython gh-106883; seen with 3.11.7). And if building a frame's `f_back` starts one, the
    other thread may have left that frame meanwhile: the result was a dict, once in thousands of tests.
    """
    with _FRAMES_LOCK:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


def _where(thread_id: int) -> tuple[str, str]:
    """The library function that a thread is in, and the line of the user's code: `("save()", "train.py:41")`."""
    with _without_collections():
        return _outwards_in_words(sys._current_frames().get(thread_id))


def _outwards_in_words(frame: FrameType | None) -> tuple[str, str]:
    call, users = _outwards(frame)
    return call, f"{Path(users.f_code.co_filename).name}:{users.f_lineno}" if users is not None else ""


_JOURNALS: weakref.WeakSet[Journal] = weakref.WeakSet()


def _refuse_in_child() -> None:
    """Called in a child that was forked: by a user's loop, or for a worker of a DataLoader. The only rank of its job
    sends nothing, and its child may use what it has of the engine."""
    for journal in tuple(_JOURNALS):
        if journal.has_others:
            journal.fault = Fault(_FORKED, (journal.rank,), "")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_refuse_in_child)
