"""Ranks that disagree, leave or are late, on threads: every rank raises one message, or nothing happens at all."""

from __future__ import annotations

import copy
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm.group import Group
from shardwise.comm.transport.threads import PostOffice, ThreadTransport
from shardwise.comm.watch.journal import Awaited, Journal
from shardwise.comm.watch.status_board import BoardError
from shardwise.comm.watch.watchdog import Watchdog
from shardwise.comm.work import LinkError, Pending
from shardwise.errors import FaultError, StateError
from shardwise.testing import Fault, InjectedError, fail_at, run_ranks, skip_at, stall_at
from tests import inside
from tests.patience import wait_until
from tests.thorough import sampled, soak

NUM_RANKS = 3
PRESETS = ["ddp", "zero1", "zero2", "zero3", "zero3-kept"]
NO_FAULT: Fault = lambda *_: False  # noqa: E731
Outcome = list[float] | FaultError


class Stack(nn.Module):
    """Four blocks, one of which can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.skips = False
        self.inside: Callable[[], object] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if index == 2:
                self.inside()
            if not (self.skips and index == 2):
                x = block(x)
        return x


def train(
    fault: Fault,
    preset: str = "zero3",
    *,
    also: Callable[[sw.Engine, int], object] | None = None,
    catches: tuple[type[BaseException], ...] = (),
    shares_memory: bool = True,
) -> list[Outcome]:
    """Losses of five steps, or the fault, by rank. `also` is called before each step."""
    torch.manual_seed(0)
    start = Stack()
    replicas = [copy.deepcopy(start) for _ in range(NUM_RANKS)]

    def rank(world: sw.World) -> Outcome:
        model = replicas[world.rank]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        plan = {"preset": preset, "units": {"class": "Linear"}, "patience_seconds": 0.3}
        losses = []
        with sw.shard(model, plan, optimizer=optimizer, world=world) as engine:
            try:
                for step in range(5):
                    model.skips = fault(world.rank, step, "block")
                    model.inside = partial(fault, world.rank, step, "inside")
                    try:
                        fault(world.rank, step, "forward")
                        loss = engine(torch.ones(2, 8)).square().mean()
                        if not fault(world.rank, step, "backward"):
                            engine.backward(loss)
                    except catches:
                        continue
                    if also is not None:
                        also(engine, step)
                    if not fault(world.rank, step, "step"):
                        engine.step()
                    losses.append(loss.item())
            except FaultError as error:
                with pytest.raises(FaultError, match="start the job again"):
                    engine.any_rank(False)  # refused, in the same words
                return error
        return losses

    return run_ranks(NUM_RANKS, rank, patience_seconds=0.3, shares_memory=shares_memory, fault=fault)


def the_letter(outcomes: list[Outcome]) -> FaultError:
    """The error, once it is sure that all ranks have the same."""
    errors = [outcome for outcome in outcomes if isinstance(outcome, FaultError)]
    assert len(errors) == NUM_RANKS
    assert len({str(error) for error in errors}) == 1
    return errors[0]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("what", ["backward", "step"])
@pytest.mark.parametrize("step", [0, 3], ids=["while-recorded", "while-followed"])
@sampled
def test_a_backward_or_step_left_out(preset: str, what: str, step: int) -> None:
    error = the_letter(train(skip_at(1, step, what), preset))
    if step == 0:  # ranks also agree, as long as there is no program, so they may wait along two lines
        assert error.kind in ("contradiction", "deadlock")
        assert 1 in error.ranks
    else:
        assert (error.kind, error.ranks) == ("contradiction", (1,))
        assert all(f"rank {rank} " in str(error) for rank in range(NUM_RANKS))
    assert "test_ranks.py:" in str(error)


def test_what_a_step_sends_outside_of_the_program_is_known_by_the_users_call() -> None:
    """Though torch's optimizer stands between that call and ours."""
    calls: set[str] = set()

    def look(engine: sw.Engine, step: int) -> None:
        tracks = engine.world.collectives(torch.device("cpu")).journal.status(beat=step, seconds=0).tracks
        calls.update(entered.text for track in tracks.values() for entered in track.recent)

    train(NO_FAULT, also=look)
    assert "step()" in calls
    assert "<lambda>()" not in calls


def test_a_module_that_one_rank_adds() -> None:
    """Where parameters are gathered a program cannot know of it. The message names module and rank, and what to do. (To
    leave one out is right: `test_different_ways.py`.)"""

    def leave_out(rank: int, step: int, what: str) -> bool:
        return what == "block" and (rank, step) != (1, 3)

    error = the_letter(train(leave_out, "zero3", shares_memory=False))
    assert (error.kind, error.ranks) == ("contradiction", (1,)), str(error)
    assert "where ranks 0 and 2 came to 'before forward blocks.3' and rank 1 came to 'before forward blocks.2'" in str(
        error
    )
    assert "If ranks are to call different modules, say paths: by_rank in the plan." in str(error)
    assert all(f"\n    rank {rank} " in str(error) for rank in range(NUM_RANKS))
    assert error.unit.startswith("blocks.")


def test_a_method_that_only_one_rank_calls(tmp_path: Path) -> None:
    def save(engine: sw.Engine, step: int) -> None:
        if step == 2 and engine.world.rank == 0:
            engine.save(tmp_path)

    error = the_letter(train(NO_FAULT, also=save))
    assert error.kind == "deadlock"
    assert "rank 0 waits in save() (test_ranks.py:" in str(error)
    assert "'before step' for 'agree" in str(error)


def test_similar_messages_are_not_confused() -> None:
    """`any_rank` and `barrier` begin with the same bytes."""

    def mix(engine: sw.Engine, step: int) -> None:
        if step == 2:
            _ = engine.any_rank(False) if engine.world.rank == 2 else engine.world.barrier()

    error = the_letter(train(NO_FAULT, also=mix))
    assert (error.kind, error.ranks) == ("contradiction", (2,))
    assert "rank 2 has any_rank() there" in str(error)


def test_lengths_that_differ() -> None:
    def rank(world: sw.World) -> FaultError:
        full = torch.zeros(4 * (NUM_RANKS + (NUM_RANKS if world.rank == 0 else 0)))
        with pytest.raises(FaultError) as raised:
            world.collectives(full.device).all_gather(full, world.everybody, "full").wait()
        return raised.value

    error = the_letter([*run_ranks(NUM_RANKS, rank, patience_seconds=0.3)])
    assert (error.kind, error.ranks) == ("contradiction", (0,))
    assert "of 24 elements" in str(error)


@pytest.mark.parametrize("shares_memory", [True, False])
@pytest.mark.parametrize("odd", [(), ("gathered 0.weight", "gathered 1.weight"), ("gathered 1.weight",)])
def test_what_only_one_rank_has_marked(odd: tuple[str, ...], shares_memory: bool) -> None:
    """It has sent nothing; the next collective, along any line, tells, from the first difference on."""
    is_longer = odd[:1] == ("gathered 0.weight",)
    first = ("nothing else", odd[1]) if is_longer else ("gathered 0.weight", ", ".join(odd) or "nothing else")

    def rank(world: sw.World) -> FaultError:
        total = torch.ones(6)
        collectives = world.collectives(total.device)
        collectives.journal.mark("the same everywhere")
        collectives.all_reduce(total, total, world.everybody, total.dtype, "total").wait()
        assert total[0] == 2
        for what in odd if world.rank else ("gathered 0.weight",):
            collectives.journal.mark(what)
        with pytest.raises(FaultError) as raised:
            collectives.all_reduce(total, total, world.everybody, total.dtype, "total").wait()
        return raised.value

    errors = run_ranks(2, rank, patience_seconds=0.3, shares_memory=shares_memory)
    assert len({str(error) for error in errors}) == 1
    assert (errors[0].kind, errors[0].ranks) == ("contradiction", (0, 1))
    for number, words in enumerate(first):
        assert f"rank {number} has all_reduce() there, after {words}, and" in str(errors[0])


@pytest.mark.parametrize("preset", PRESETS)
@sampled
def test_an_action_left_out(preset: str) -> None:
    error = the_letter(train(skip_at(1, 3, "*reduce* blocks.2 * B*"), preset))
    assert (error.kind, error.ranks) == ("contradiction", (1,))


@pytest.mark.parametrize(
    "point",
    ["forward", "backward", "step", "gather blocks.1 *", "reduce_scatter blocks.2 *", "* of verdict", "* of barrier"],
)
def test_a_rank_that_raises(point: str) -> None:
    """It raises its own error; the others raise the message, which has its words."""
    seen: list[FaultError] = []
    fault = fail_at(1, 2, point)

    torch.manual_seed(0)
    start = Stack()
    replicas = [copy.deepcopy(start) for _ in range(NUM_RANKS)]

    def rank(world: sw.World) -> None:
        model = replicas[world.rank]
        plan = {"preset": "zero3", "units": {"class": "Linear"}}
        engine = sw.shard(model, plan, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), world=world)
        try:
            for step in range(5):
                world.barrier()
                fault(world.rank, step, "forward")
                loss = engine(torch.ones(2, 8)).sum()
                fault(world.rank, step, "backward")
                engine.backward(loss)
                fault(world.rank, step, "step")
                engine.step()
        except FaultError as error:
            seen.append(error)
            raise

    with pytest.raises(InjectedError, match="rank 1 was to fail"):
        run_ranks(NUM_RANKS, rank, patience_seconds=0.3, fault=fault)
    assert [(error.kind, error.ranks) for error in seen] == [("raised", (1,))] * 2
    assert f"Rank 1 raised InjectedError: rank 1 was to fail at step 2, {point}" in str(seen[0])


@pytest.mark.parametrize("shares_memory", [True, False])
def test_an_exception_that_one_rank_catches_is_reported(shares_memory: bool) -> None:
    """It goes on with the next batch; the others are still in this one. Where nothing is sent to gather, too."""
    error = the_letter(train(fail_at(1, 2, "inside"), catches=(InjectedError,), shares_memory=shares_memory))
    assert (error.kind, error.ranks) == ("contradiction", (1,))
    assert "raised InjectedError: rank 1 was to fail at step 2, inside" in str(error)


def test_a_slow_rank_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A line, another after twice the time, and the same losses as ever."""
    undisturbed = train(NO_FAULT)
    worlds: dict[int, sw.World] = {}

    def be_late() -> None:
        inside.await_waiting(worlds[1], worlds.values())
        caplog.clear()
        wait_until(lambda: len(caplog.messages) > 1)
        for world in worlds.values():
            world.be_patient(60)

    with caplog.at_level(logging.WARNING, logger="shardwise"):
        late, begun = stall_at(1, 2, "backward", until=be_late), time.monotonic()
        assert train(late, also=lambda engine, _: worlds.setdefault(engine.world.rank, engine.world)) == undisturbed
    assert all(message.startswith("rank 1 computes, last seen at 'after forward") for message in caplog.messages)
    assert "Because of it rank 0 waits in 'after backward blocks.2' for 'reduce_scatter blocks.3" in caplog.text
    doublings = math.log2((time.monotonic() - begun) / 0.3)
    assert len(caplog.messages) <= 1 + doublings  # one rank speaks, and ever more seldom


def test_a_rank_that_stalls_for_longer_than_the_timeout() -> None:
    worlds: dict[int, sw.World] = {}

    late = stall_at(1, 2, "step", until=lambda: inside.stall(worlds[1], worlds.values(), 0.8))
    outcomes = train(late, also=lambda engine, _: worlds.setdefault(engine.world.rank, engine.world))
    error = the_letter(outcomes)
    assert (error.kind, error.ranks) == ("timeout", (1,))
    assert "Timeout of 0.8 s: rank 1 computes, last seen at 'after backward'" in str(error)
    assert "a forward of one rank is for engine.inference()" in str(error)


def test_a_rank_that_ends_too_early() -> None:
    def rank(world: sw.World) -> FaultError | None:
        if world.rank == 1:
            return None
        with pytest.raises(FaultError) as raised:
            world.mean(1.0)
        return raised.value

    errors = run_ranks(NUM_RANKS, rank, patience_seconds=0.3)
    assert [(error.kind, error.ranks) for error in errors if error is not None] == [("ended", (1,))] * 2


def test_a_world_that_was_closed_refuses() -> None:
    def rank(world: sw.World) -> None:
        model = nn.Linear(4, 4)
        engine = sw.shard(model, "ddp", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), world=world)
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        world.close()
        with pytest.raises(StateError, match=f"The world of rank {world.rank} was closed, so nothing more can be sent"):
            engine.backward(engine(torch.ones(1, 4)).sum())
        with pytest.raises(StateError, match=r"Call world\.close\(\) after the last step"):
            world.barrier()

    run_ranks(2, rank)
    with sw.World(0, 1, ThreadTransport(PostOffice(), 0)) as alone:
        pass
    alone.barrier()  # sends nothing


def test_a_watch_that_breaks_down_ends_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread would end, and nobody would be told of anything any more."""

    def broken(mine: object, *_: object) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr("shardwise.comm.watch.watchdog.judge", broken)

    def rank(world: sw.World) -> FaultError:
        if world.rank == 1:
            inside.await_fault(world)  # rank 0 waits meanwhile, so its watch looks at the others
        with pytest.raises(FaultError) as raised:
            world.barrier()
        return raised.value

    errors = run_ranks(2, rank, patience_seconds=0.3)
    assert {(error.kind, error.ranks, error.origin) for error in errors} == {("raised", (0,), 0)}
    assert "The watch over rank 0 broke down, which is a defect of shardwise: KeyError: 'a defect'." in str(errors[1])


@soak("a timeout of 4 s")
def test_a_silent_rank_is_reported_by_another(caplog: pytest.LogCaptureFixture) -> None:
    """It has begun what the others wait for, so they all wait in the same place; its own watch says nothing more."""

    def rank(world: sw.World) -> FaultError:
        world.barrier()
        if world.rank == 0:  # as if it were stopped: its reports end, and it sends nothing
            watch = world._watch
            assert watch is not None
            report = world.journal.status(beat=10**6, seconds=0)
            world.journal.enter("gather", world.everybody, 64 * 3, torch.uint8, "full")
            entered = world.journal.status(beat=10**6, seconds=0)
            awaited = ("world 0-2/3", entered.count("world 0-2/3"), (0, 1, 2))
            watch._board.publish(replace(report, tracks=entered.tracks, awaited=awaited, state="waiting"))
            watch._publish = lambda: world.journal.status(0, 0)  # type: ignore[method-assign]
            raise inside.await_fault(world).error()
        world._host.all_gather(torch.zeros(64 * 3, dtype=torch.uint8), world.everybody, "full").wait()
        raise AssertionError

    def fails(world: sw.World) -> FaultError:
        with pytest.raises(FaultError) as raised:
            rank(world)
        return raised.value

    with caplog.at_level(logging.WARNING, logger="shardwise"):
        errors = run_ranks(3, fails, patience_seconds=0.5, timeout_seconds=4, shares_memory=False)
    assert {(error.kind, error.ranks) for error in errors} == {("timeout", (0,))}
    assert "rank 0 has not been heard of for" in str(errors[1])
    assert "(stopped, or cut off)" in str(errors[1])
    assert caplog.messages
    assert all("rank 0 has not been heard of for" in message for message in caplog.messages)
    assert "Because of it rank 1 waits in" in caplog.text


def test_a_rank_that_is_gone_is_found_though_nobody_waits_at_a_socket() -> None:
    """Rank 0 waits for its device, where kernels wait for rank 1, which is killed: only its connection is closed."""
    lost: list[int] = []

    def rank(world: sw.World) -> FaultError | None:
        world.barrier()
        watch = world._watch
        assert watch is not None
        if world.rank == 1:  # its reports end
            watch._publish = lambda: world.journal.status(0, 0)  # type: ignore[method-assign]
            lost.append(1)
            inside.await_fault(world)
            return None
        watch._lost_ranks = lambda: lost
        entry = world.journal.enter("gather", world.everybody, 64, torch.uint8, "full")
        world.journal.device_wait = lambda: entry
        return inside.await_fault(world).error()

    error, _ = run_ranks(2, rank, patience_seconds=0.5, shares_memory=False)
    assert error is not None
    assert (error.kind, error.ranks) == ("lost", (1,))
    assert "its connection to rank 0 is closed" in str(error)


def test_a_connection_that_breaks_between_living_ranks_is_nobodys_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 computes meanwhile, and only its reports show that it is alive."""

    def rank(world: sw.World) -> FaultError:
        world.barrier()
        receive, broken = world.transport.receive, Breaks(LinkError(2, "The connection to rank 2 broke: reset."))
        if world.rank == 2:
            inside.await_fault(world)
        if world.rank == 1:
            monkeypatch.setattr(
                world.transport, "receive", lambda tensor, of, tag: broken if of == 2 else receive(tensor, of, tag)
            )
        with pytest.raises(FaultError) as raised:
            world.barrier()
        return raised.value

    errors = run_ranks(3, rank, patience_seconds=0.5, shares_memory=False)
    assert {(error.kind, error.ranks, error.origin) for error in errors} == {("disconnected", (1, 2), 1)}
    assert "Ranks 1 and 2 could not reach each other, though both are alive. The connection to rank 2" in str(errors[0])


def test_a_message_that_never_arrives_is_the_networks_fault() -> None:
    """Both have begun the same, and wait for each other's part."""
    worlds: dict[int, sw.World] = {}

    def rank(world: sw.World) -> FaultError:
        world.barrier()
        entry = world.journal.enter("gather", world.everybody, 64, torch.uint8, "full")
        never = world.transport.receive(torch.empty(1), 1 - world.rank, 7)
        worlds[world.rank] = world
        with pytest.raises(FaultError) as raised:
            Awaited(world.journal, entry, never).wait()
        return raised.value

    def lose_patience() -> None:
        wait_until(lambda: len(worlds) == 2 and all(world.journal.waiting is not None for world in worlds.values()))
        inside.time_out(worlds.values(), 1)

    with ThreadPoolExecutor(1) as beside:
        losing = beside.submit(lose_patience)
        errors = run_ranks(2, rank, patience_seconds=0.3, shares_memory=False)
        losing.result()
    assert {(error.kind, error.ranks) for error in errors} == {("disconnected", (0, 1))}
    assert "Timeout of 1 s: ranks 0 and 1 could not reach each other, though all are alive." in str(errors[0])


class Breaks:
    """A message whose connection breaks."""

    def __init__(self, error: LinkError) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error


def test_a_transfer_that_is_given_up_waits_no_second_time_for_what_has_arrived() -> None:
    """gloo would wait for another message, until the world's timeout."""
    arrived: list[str] = []

    class Arrives:
        def wait(self) -> None:
            arrived.append("waited for")

    finished: list[str] = []
    transfer = Pending([Arrives(), Breaks(LinkError(1, "broke")), Arrives()], lambda: finished.append("finished"))
    for _ in range(2):
        with pytest.raises(LinkError):
            transfer.wait()
    assert (arrived, finished) == (["waited for"], [])


@pytest.mark.parametrize(
    ("rank", "error", "outlives_ranks", "ranks"),
    [
        (1, "Connection reset by peer", False, (0,)),
        (0, "Connection reset by peer", False, (0,)),
        (1, "wait timeout after 5000ms", False, ()),
        (1, "Connection reset by peer", True, ()),
    ],
)
def test_when_the_store_is_gone_only_what_is_known_is_blamed(
    rank: int, error: str, outlives_ranks: bool, ranks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank behind a broken connection may have ended because of another; its report cannot be read."""
    office = PostOffice()
    monkeypatch.setattr(office, "outlives_ranks", outlives_ranks, raising=False)
    journal = Journal(2)
    watch = Watchdog(journal, 3, office, lambda: None, patience_seconds=60, timeout_seconds=60)

    def gone(*_: object) -> None:
        raise BoardError(error)

    for name in ("publish", "read", "fault"):
        monkeypatch.setattr(office, name, gone)
    found = watch._explain(LinkError(rank, f"The connection to rank {rank} broke: Connection closed by peer."))
    assert isinstance(found, FaultError)
    assert (found.kind, found.ranks) == ("lost", ranks)
    assert f"The connection to rank {rank} broke" in str(found)
    assert f"The store is gone too: {error}" in str(found)
    watch.close(parts=False)


def test_actions_that_differ_only_in_their_subject_are_distinguished() -> None:
    """Not by who sends it: two functions may send the same thing."""

    def one(world: sw.World) -> None:
        world.exchange(b"", "greeting")

    def other(world: sw.World) -> None:
        world.exchange(b"", "greeting")

    run_ranks(2, lambda world: (one if world.rank else other)(world))
    with pytest.raises(FaultError, match="contradict"):
        run_ranks(2, lambda world: world.exchange(b"", f"greeting of {world.rank}"))


def test_lines_are_distinguished_by_all_their_ranks() -> None:
    """These two begin and end alike."""
    journal = Journal(0)
    one = journal.enter("gather", Group("dp", (0, 1, 3), 0), 8, torch.float32, "x")
    other = journal.enter("gather", Group("dp", (0, 2, 3), 0), 8, torch.float32, "x")
    again = journal.enter("gather", Group("dp", (0, 1, 3), 0), 8, torch.float32, "x")
    assert one.line is again.line is not other.line
    assert [one.number, other.number, again.number] == [1, 1, 2]
    assert journal.ranks_of(other.line.name) == (0, 2, 3)


def test_nothing_is_left_behind() -> None:
    before = threading.active_count()
    for _ in range(20):
        run_ranks(2, lambda world: world.barrier())
    assert threading.active_count() <= before


@pytest.mark.parametrize("outlives_ranks", [False, True])
def test_a_rank_that_failed_stays_only_where_it_may_keep_the_board(
    outlives_ranks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its script is over. Others may still have to read why; where the launcher keeps the board, they can."""
    office = PostOffice()
    monkeypatch.setattr(office, "outlives_ranks", outlives_ranks, raising=False)
    scripts_end: list[Callable[[], object]] = []
    monkeypatch.setattr("atexit.register", scripts_end.append)
    stayed: list[float] = []
    Watchdog(Journal(0), 2, office, lambda: None, patience_seconds=2, timeout_seconds=10)
    monkeypatch.setattr("sys.last_value", ValueError("a bad batch"), raising=False)
    monkeypatch.setattr("time.sleep", stayed.append)
    (end,) = scripts_end
    end()
    assert stayed == ([] if outlives_ranks else [0.5])
    message = office.fault()
    assert message is not None
    assert message.ranks == (0,)
