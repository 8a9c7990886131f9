"""Which ranks continue is decided from messages and deaths, in any order."""

from __future__ import annotations

import atexit
import random
import threading
from collections.abc import Callable

import pytest

from shardwise.cli.main import main
from shardwise.comm.members import Announcement, MemberMessage
from shardwise.comm.members.membership import StoreMembership
from shardwise.elastic.causes import Cause, Disconnection
from shardwise.errors import CommError, ConfigError, SpareError, TurnedAwayError
from shardwise.launch.elastic.budget import Budget
from shardwise.launch.elastic.changes import Change, change_report
from shardwise.launch.elastic.disconnections import Disconnections
from shardwise.launch.elastic.processes import Loss
from shardwise.launch.elastic.rendezvous import SILENT_SECONDS, STOPPED_SECONDS, Rendezvous
from shardwise.launch.job import Elastic


class Job:
    """Members as they behave: they follow the announcements, each when its turn comes, unless they are dead."""

    def __init__(self, num_ranks: int, least: int, most: int, *, can_grow: bool = False) -> None:
        self.now = 0.0
        self.stopped: set[int] = set()
        self.rendezvous = Rendezvous(
            least, most, can_grow=lambda: can_grow, is_stopped=lambda number, _: number in self.stopped
        )
        self.announcements: list[Announcement] = []
        self.num_read = dict.fromkeys(range(num_ranks), 0)
        self.alive = set(range(num_ranks))
        self.entered: dict[int, tuple[int, ...]] = {}
        self.away: set[int] = set()
        self.lets_in = True
        for number in range(num_ranks):
            self.rendezvous.started(number)

    def start(self, number: int) -> None:
        self.rendezvous.started(number)
        self.alive.add(number)
        self.num_read[number] = len(self.announcements)
        self.say(number, "here")

    def say(self, number: int, kind: str, generation: int = -1, text: str = "", at_fault: tuple[int, ...] = ()) -> None:
        message = MemberMessage(kind, number, generation, 7, text, at_fault, pid=number, lets_in=self.lets_in)  # type: ignore[arg-type]
        self.rendezvous.receive(message, self.now)
        self.collect()

    def kill(self, number: int) -> None:
        self.alive.discard(number)
        self.rendezvous.died(number, "was killed by SIGKILL", self.now)
        self.collect()

    def collect(self) -> None:
        self.announcements += self.rendezvous.announcements
        self.rendezvous.announcements.clear()
        for number, _ in self.rendezvous.kills:
            if number in self.alive:
                self.alive.discard(number)
                self.rendezvous.died(number, "was voted out", self.now)
                self.rendezvous.kills.clear()
                self.collect()
                return
        self.rendezvous.kills.clear()

    def turn(self, number: int) -> bool:
        """Let a member read one letter and answer; whether there was one."""
        if number not in self.alive - self.stopped or self.num_read[number] >= len(self.announcements):
            return False
        news = self.announcements[self.num_read[number]]
        self.num_read[number] += 1
        if news.kind == "entering" and number in news.members:
            self.say(number, "heard", news.generation, "entering")
            self.say(number, "opened", news.generation)
        if news.kind == "formed" and number in self.rendezvous.members:
            self.entered[number] = next(one.members for one in self.announcements if one.generation == news.generation)
        if news.kind == "over" and number in self.rendezvous.members:
            self.say(number, "heard", news.generation, "over")
            self.say(number, "ready", news.generation)
        if news.kind == "out" and number in news.members:
            self.away.add(number)
        return True

    def settle(self, order: random.Random | None = None) -> None:
        """Until everybody has read everything."""
        moved = True
        while moved:
            numbers = sorted(self.alive)
            if order is not None:
                order.shuffle(numbers)
            moved = sum(self.turn(number) for number in numbers) > 0

    def wait(self, seconds: float) -> None:
        """While the launcher looks at it ten times."""
        for _ in range(10):
            self.now += seconds / 10
            self.rendezvous.tick(self.now)
            self.collect()
            self.settle()

    def begin(self) -> None:
        for number in sorted(self.alive):
            self.say(number, "here")
        self.settle()


def test_survivors_keep_their_order_and_replacements_are_last() -> None:
    job = Job(4, 2, 4)
    job.begin()
    assert job.rendezvous.state == "formed"
    assert job.rendezvous.members == (0, 1, 2, 3)
    job.kill(1)
    assert job.announcements[-1].kind == "over"
    assert job.announcements[-1].members == (1,)
    assert "Rank 1 of 4 is gone: it was killed by SIGKILL." in job.announcements[-1].text
    job.settle()
    assert job.rendezvous.members == (0, 2, 3)
    job.start(4)
    assert job.announcements[-1].kind == "wanted"
    for number in (0, 2):
        job.say(number, "ready", job.rendezvous.generation)
    assert job.rendezvous.members == (0, 2, 3)  # not before all are at the boundary
    job.say(3, "ready", job.rendezvous.generation)
    job.settle()
    assert job.rendezvous.members == job.entered[4] == (0, 2, 3, 4)
    assert next(one for one in job.announcements if one.members == (0, 2, 3, 4)).before == (0, 2, 3)
    assert [job.rendezvous.is_new(number) for number in (0, 4)] == [False, True]
    job.rendezvous.receive(MemberMessage("raised", 4, job.rendezvous.generation, 8, "ValueError"), job.now)
    assert not job.rendezvous.is_new(4), "it has taken a step with the others, as it says"


def test_a_member_that_ends_in_the_middle_of_the_others_training_is_named() -> None:
    job = Job(3, 2, 3)
    job.begin()
    job.alive.discard(1)
    job.rendezvous.finished(1, job.now)
    job.collect()
    job.say(0, "ready", 0, "Rank 1 is gone without a word")
    job.settle()
    assert (job.rendezvous.members, job.rendezvous.ended, job.rendezvous.losses) == ((0, 2), (1,), [])


@pytest.mark.parametrize("seed", range(40))
def test_all_who_live_enter_the_same_generation_whoever_dies_whenever(seed: int) -> None:
    """Deaths between any two letters: what the living have entered last is one list, and it has nobody dead."""
    order = random.Random(seed)
    job = Job(6, 1, 6)
    job.begin()
    for _ in range(order.randint(1, 5)):
        for _ in range(order.randint(0, 12)):
            job.turn(order.choice(sorted(job.alive)))
        job.kill(order.choice(sorted(job.alive)))
    job.settle(order)
    assert job.rendezvous.state == "formed"
    assert {job.entered[number] for number in job.alive} == {tuple(sorted(job.alive))}
    for formed in (one for one in job.announcements if one.kind == "formed"):
        over = [
            n for n, one in enumerate(job.announcements) if one.kind == "over" and one.generation == formed.generation
        ]
        assert not over or job.announcements.index(formed) < over[0]


def test_a_stopped_member_is_voted_out_and_turned_away_when_it_comes_back() -> None:
    job = Job(3, 2, 3)
    job.begin()
    job.stopped.add(2)
    job.say(0, "ready", 0, "Timeout of 3 s", at_fault=(2,))
    job.settle()
    assert job.rendezvous.members == (0, 1)
    job.say(2, "ready", 0)
    assert job.announcements[-1].kind == "out"
    assert "took this rank for lost" in job.announcements[-1].text


def test_a_stopped_rank_is_given_up_soon_and_a_computing_one_is_not() -> None:
    job = Job(4, 1, 4)
    job.begin()
    job.stopped.add(3)
    job.kill(0)
    job.settle()
    job.wait(STOPPED_SECONDS * 1.5)
    assert job.rendezvous.members == (1, 2)
    job.kill(1)
    job.say(2, "heard", job.rendezvous.generation, "over")
    job.now += 2 * SILENT_SECONDS
    job.rendezvous.tick(job.now)
    assert not job.rendezvous.kills  # its thread for announcements answers: the other one may be computing


@pytest.mark.parametrize("heard", ["nothing", "over", "entering"])
def test_a_rank_that_is_stopped_is_given_up_soon_whatever_it_has_heard_before(heard: str) -> None:
    """A campaign of kills hung for a minute, and would have for ten in a job that is as patient as usual: one rank was
    stopped between two lines of its recovery."""
    job = Job(4, 1, 4)
    job.begin()
    job.stopped.add(3)
    job.kill(0)
    job.settle()
    if heard != "nothing":
        job.say(3, "heard", 0, "over")
    if heard == "entering":
        job.say(3, "ready", 0)
        job.settle()
        job.say(3, "heard", 1, "entering")
        assert job.rendezvous.state == "entering"
    job.wait(STOPPED_SECONDS * 1.5)
    assert job.rendezvous.members == (1, 2)
    assert job.rendezvous.state == "formed"


def test_a_rank_that_is_stopped_for_moments_is_waited_for() -> None:
    """As by a profiler that looks at its stack."""
    job = Job(4, 1, 4)
    job.begin()
    job.kill(0)
    for _ in range(10):
        job.stopped.add(3)
        job.wait(STOPPED_SECONDS * 0.4)
        job.stopped.clear()
        job.say(3, "heard", 0, "over")
        job.wait(STOPPED_SECONDS * 0.3)
    assert 3 in job.alive
    job.settle()
    assert job.rendezvous.members == (1, 2, 3)


def test_a_host_is_lost_with_all_its_ranks_at_once_and_everybody_knows_where_the_others_are() -> None:
    job = Job(4, 2, 4)
    for number in (2, 3):
        job.rendezvous.processes[number].host = "gpu2"
    for number in (0, 1):
        job.rendezvous.processes[number].host = "gpu1"
    job.begin()
    assert job.announcements[0].hosts == ("gpu1", "gpu1", "gpu2", "gpu2")
    job.alive -= {2, 3}
    job.rendezvous.lost("gpu2", (2, 3), "no word", 1.0)
    job.collect()
    over = [one for one in job.announcements if one.kind == "over"]
    assert [one.members for one in over] == [(2, 3)], "one letter for all of them"
    assert over[0].text == "Host gpu2 is gone: ranks 2, 3 (no word)."
    job.settle()
    assert job.rendezvous.members == (0, 1)
    assert job.announcements[-2].hosts == ("gpu1", "gpu1")
    assert {(loss.rank, loss.host) for loss in job.rendezvous.losses} == {(2, "gpu2"), (3, "gpu2")}


def test_a_new_rank_is_placed_next_to_those_of_its_host() -> None:
    job = Job(4, least=1, most=5)
    for number, host in enumerate("aabb"):
        job.rendezvous.processes[number].host = host
    for number in range(4):
        job.say(number, "here")
    job.settle()
    job.kill(1)
    job.settle()
    assert job.rendezvous.members == (0, 2, 3)
    for number, host in ((4, "a"), (5, "c")):
        job.rendezvous.started(number, host)
        job.alive.add(number)
        job.num_read[number] = len(job.announcements)
        job.say(number, "here")
    for number in (0, 2, 3):
        job.say(number, "ready", job.rendezvous.generation)
    job.settle()
    assert job.rendezvous.members == (0, 4, 2, 3, 5)
    assert job.rendezvous.state == "formed"
    entering = [one for one in job.announcements if one.kind == "entering"][-1]
    assert (entering.hosts, entering.before) == (("a", "a", "b", "b", "c"), (0, 2, 3))


def test_members_are_sent_away_when_enough_go_on_without_them() -> None:
    job = Job(3, 2, 3)
    job.begin()
    assert job.rendezvous.can_spare({0})
    assert not job.rendezvous.can_spare({0, 1})
    job.start(3)
    assert job.rendezvous.can_spare({0, 1}), "one waits to be let in"
    assert not job.rendezvous.can_spare({0, 1, 2}), "nobody would know how far the training has come"
    job.rendezvous.send_away({0, 1})
    job.collect()
    assert (job.announcements[-1].kind, set(job.announcements[-1].members)) == ("leave", {0, 1})
    for number in (0, 1):
        job.say(number, "leaving")
    for number in (0, 1, 2):
        job.say(number, "ready", 0)
    job.settle()
    assert job.rendezvous.members == (2, 3)
    assert {0, 1} <= job.away


@pytest.mark.parametrize("budget", [0, 2])
def test_fewer_than_the_least_wait_for_one_that_is_to_come_and_end_without(budget: int) -> None:
    """Whether the launcher was told so, or the plan's budget needs as many."""
    for can_grow in (True, False):
        job = Job(2, 1 if budget else 2, 2, can_grow=can_grow)
        job.begin()
        if budget:
            job.say(1, "least", text="5")
            job.say(0, "least", text=f"{budget}")  # after a change of plan
        job.kill(0)
        job.settle()
        assert job.rendezvous.state == ("gathering" if can_grow else "lost")
        assert not job.rendezvous.is_busy, "or nobody would be started"
        if can_grow:
            job.start(2)
            job.settle()
            assert job.rendezvous.members == (1, 2)
            assert job.rendezvous.state == "formed"
        else:
            why = "the plan's budget" if budget else "--elastic"
            assert job.rendezvous.why_lost == f"1 rank is left, and the job needs 2 ({why})."


@pytest.mark.parametrize("least", [2, 3])
def test_after_a_death_replacements_join_only_at_a_joining_point(least: int) -> None:
    """Nor where they are too few: they go on together until they are there, and all know that they are to meet."""
    job = Job(3, least, 3, can_grow=True)
    job.begin()
    job.lets_in = False
    job.kill(0)
    job.start(3)
    job.settle()
    assert job.rendezvous.state == "formed"
    assert job.rendezvous.members == (1, 2)
    assert [news.kind for news in job.announcements[-3:]] == ["entering", "wanted", "formed"], "known before they go on"
    job.say(1, "ready", 1)
    job.lets_in = True
    job.say(2, "ready", 1)
    job.settle()
    assert job.rendezvous.members == (1, 2), "not before all are there"
    job.kill(1)
    job.start(4)
    job.settle()
    assert job.rendezvous.members == job.entered[4] == (2, 3, 4)


def test_too_few_go_on_to_where_they_let_others_in_and_wait_there() -> None:
    job = Job(3, 3, 3, can_grow=True)
    job.begin()
    job.lets_in = False
    job.kill(0)
    job.settle()
    assert job.rendezvous.members == (1, 2)
    assert [news.kind for news in job.announcements[-3:]] == ["entering", "wanted", "formed"]
    job.lets_in = True
    for number in (1, 2):
        job.say(number, "ready", 1)
    job.settle()
    assert job.rendezvous.generation == 1
    assert not job.rendezvous.is_busy
    job.now += 2 * SILENT_SECONDS
    job.rendezvous.tick(job.now)
    assert not job.rendezvous.kills
    job.start(3)
    job.settle()
    assert job.rendezvous.members == job.entered[3] == (1, 2, 3)


def test_one_that_asks_to_leave_goes_at_a_boundary_and_one_that_raised_only_when_its_process_is_gone() -> None:
    job = Job(4, 1, 4)
    job.begin()
    job.say(1, "leaving", 0)
    assert job.announcements[-1].kind == "wanted"
    for number in range(4):
        job.say(number, "ready", 0)
    job.settle()
    assert job.away == {1}
    assert job.rendezvous.members == (0, 2, 3)
    assert not job.rendezvous.losses
    job.say(2, "raised", 1, "ValueError: a bad batch")
    job.alive.discard(2)
    job.settle()
    assert job.rendezvous.members == (0, 2, 3)  # what outlives it may still be written to
    job.kill(2)
    job.settle()
    assert job.rendezvous.members == (0, 3)


def test_one_that_raises_when_all_others_are_ready_is_waited_for_too() -> None:
    """Else its loss is reported and forgotten before its process ends, which would not be replaced."""
    job = Job(4, 1, 4)
    job.begin()
    job.kill(0)
    job.stopped.add(3)
    job.settle()
    job.say(3, "raised", 0, "FaultError: Rank 0 of 4 is gone")
    assert job.rendezvous.members == (0, 1, 2, 3)
    job.kill(3)
    job.stopped.clear()
    job.settle()
    assert job.rendezvous.members == (1, 2)
    assert [loss.member for loss in job.rendezvous.losses] == [0, 3]


def test_generations_that_cannot_be_opened_are_tried_a_few_times() -> None:
    job = Job(2, 1, 2)
    for number in range(2):
        job.say(number, "here")
    for _ in range(20):
        job.say(0, "ready", job.rendezvous.generation, "no route to host")
        job.say(1, "ready", job.rendezvous.generation)
    assert job.rendezvous.state == "lost"
    assert "though none of them died" in job.rendezvous.why_lost


def fault(job: Job, step: int) -> None:
    """All report a fault after `step` in which nobody was lost, and meet again."""
    generation = job.rendezvous.generation
    for number, text in enumerate(("a connection broke", "")):
        job.rendezvous.receive(MemberMessage("ready", number, generation, step, text, (), pid=number), job.now)
    job.collect()
    job.settle()


def test_faults_in_which_nobody_is_lost_end_the_job_only_if_no_step_is_taken_between_them() -> None:
    job = Job(2, 1, 2)
    job.begin()
    for step in range(10):
        fault(job, step)
        assert job.rendezvous.state == "formed"
    for _ in range(10):
        fault(job, 9)
    assert job.rendezvous.state == "lost"
    assert job.rendezvous.why_lost == "6 times in a row the ranks took no step, though none of them died."


class Causes:
    """What stands in for the classification of broken connections."""

    def __init__(self, action: str) -> None:
        self.action = action
        self.found: list[Disconnection] = []

    def disconnected(self, found: Disconnection, can_spare: Callable[[str], bool], _: float) -> Cause:
        self.found.append(found)
        is_excluded = self.action == "exclude" and can_spare("b")
        return Cause("network", "exclude" if is_excluded else "retry", found.ranks, ("b",), found.why)


@pytest.mark.parametrize("action", ["retry", "exclude"])
def test_two_that_cannot_reach_each_other_are_known_by_their_ranks_once(action: str) -> None:
    job = Job(4, 2, 4)
    rendezvous = job.rendezvous
    for number, process in rendezvous.processes.items():
        process.host = "aabb"[number]
    job.begin()
    job.kill(0)
    job.settle()
    assert rendezvous.members == (1, 2, 3)
    causes = Causes(action)
    disconnections = Disconnections(rendezvous, causes)  # type: ignore[arg-type]
    for number in rendezvous.members:  # all report the same fault
        text = "Ranks 0 and 2 could not reach each other.\nmore"
        message = MemberMessage("ready", number, rendezvous.generation, 9, text, cut_off=(1, 3), lets_in=False)
        disconnections.note(message, job.now)
        rendezvous.receive(message, job.now)
    job.collect()
    job.settle()
    why = "Ranks 0 and 2 could not reach each other."
    assert causes.found == [Disconnection((1, 3), (0, 2), ("a", "b"), why, step=9)]
    assert rendezvous.state == "formed"
    assert rendezvous.members == (1, 2, 3), "with one rank on the other host, the job cannot spare this one"
    assert [loss.member for loss in rendezvous.losses] == [0]


def test_the_ranks_of_an_excluded_host_leave_with_the_fault() -> None:
    job = Job(4, 2, 4)
    rendezvous = job.rendezvous
    for number, process in rendezvous.processes.items():
        process.host = "aabb"[number]
    job.begin()
    disconnections = Disconnections(rendezvous, Causes("exclude"))  # type: ignore[arg-type]
    for number in range(4):
        message = MemberMessage("ready", number, 0, 9, "Ranks 0 and 3 could not.", cut_off=(0, 3), lets_in=False)
        disconnections.note(message, job.now)
        rendezvous.receive(message, job.now)
    job.collect()
    job.settle()
    assert job.away == {2, 3}
    assert rendezvous.members == (0, 1)
    assert (rendezvous.num_left, rendezvous.losses) == (2, [])


class Channel:
    """That of one member, whom nobody answers."""

    member = 1

    def __init__(self) -> None:
        self.sent: list[MemberMessage] = []

    def has_sent(self) -> bool:
        return False

    def listen(self, first: int, read: Callable[[Announcement], bool]) -> threading.Thread:
        assert first == 0
        self.read = read
        return threading.Thread()

    def send(self, message: MemberMessage) -> None:
        self.sent.append(message)


def test_a_member_that_was_away_while_others_formed_a_generation_without_it_is_turned_away() -> None:
    """Its launcher does not listen to it any more, so nobody answers."""
    channel = Channel()
    membership = StoreMembership(channel, lambda opening: pytest.fail(str(opening)))  # type: ignore[arg-type]
    atexit.unregister(membership._at_exit)
    channel.read(Announcement("entering", 4, (0, 2)))  # one that waits to join is not concerned
    channel.read(Announcement("entering", 5, (0, 1)))
    assert membership._await_announcement().generation == 5
    membership._generation = 5
    channel.read(Announcement("over", 5, (1,), text="Rank 1 was lost."))
    channel.read(Announcement("entering", 6, (0, 2)))
    with pytest.raises(TurnedAwayError, match="took this rank for lost and continue without it") as away:
        membership._await_announcement()
    assert not away.value.has_asked


def test_a_member_that_has_heard_what_it_has_to_answer_says_how_long_others_may_wait_for_it() -> None:
    """The last message that comes from it counts: without that, others waited ten minutes for one that had stopped."""
    channel = Channel()
    membership = StoreMembership(channel, lambda opening: pytest.fail(str(opening)), timeout_seconds=20)  # type: ignore[arg-type]
    atexit.unregister(membership._at_exit)
    channel.read(Announcement("entering", 3, (0, 1)))
    said = channel.sent[-1]
    assert (said.kind, said.generation, said.text, said.patience_seconds) == ("heard", 3, "entering", 20)


def test_a_spare_waits_for_a_generation_that_it_is_in() -> None:
    channel = Channel()
    membership = StoreMembership(channel, lambda opening: pytest.fail(str(opening)))  # type: ignore[arg-type]
    atexit.unregister(membership._at_exit)
    channel.read(Announcement("entering", 0, (0, 1, 2, 3)))
    assert membership._await_announcement().generation == 0
    membership._generation = 0
    channel.read(Announcement("over", 0, (0,), text="Rank 0 was lost."))
    channel.read(Announcement("spare", 0, (1,), text="It has lost a rank."))
    channel.read(Announcement("entering", 1, (2, 3)))
    with pytest.raises(SpareError, match="It has lost a rank"):
        membership._await_announcement()
    channel.read(Announcement("entering", 2, (2, 3)))
    channel.read(Announcement("entering", 3, (2, 3, 1, 4), before=(2, 3)))
    assert membership._await_announcement().generation == 3
    membership._generation = 3
    channel.read(Announcement("spare", 3, (2,)))  # others
    channel.read(Announcement("end", 3, text="It is over."))
    with pytest.raises(CommError, match="It is over"):
        membership._await_announcement()


def test_after_the_end_of_a_script_no_rank_joins() -> None:
    job = Job(3, 2, 4)
    job.begin()
    job.say(0, "done", 0)
    job.rendezvous.finished(0, job.now)
    assert (job.announcements[-1].kind, job.announcements[-1].members) == ("bye", (0,))
    job.start(3)
    assert "wanted" not in [news.kind for news in job.announcements]
    job.say(1, "done", 0)
    job.kill(1)  # after it was through
    assert job.rendezvous.state == "formed"


def test_replacements_are_paid_from_a_budget_by_time_and_pause_where_one_dies_after_the_other() -> None:
    budget = Budget(3, 100)
    assert budget.ask(0, 1000.0) == 1000
    assert budget.ask(0, 1005.0) == 1005
    assert budget.ask(0, 1010.0) == 1012
    assert budget.ask(1, 1010.0) is None
    assert budget.ask(1, 1200.0) == 1200


@pytest.mark.parametrize(
    ("limits", "nproc", "words"),
    [
        (Elastic(0, 2), 1, "--elastic MIN is 0"),
        (Elastic(3, 2), 3, "--elastic 3:2: MIN is more than MAX"),
        (Elastic(2, 4), 5, "--nproc 5 is not within --elastic 2:4"),
        (Elastic(2, 4, retries=-1), 4, "--retries is -1"),
    ],
)
def test_limits_that_no_job_can_keep_are_refused(limits: Elastic, nproc: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        limits.check(nproc)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--elastic", "2"], "give the minimum and the maximum number of ranks, such as 2:8"),
        (["--retries", "3"], "--retries is for elastic jobs"),
        (["--elastic", "1:2", "--retries", "often"], "give a number, or a number and seconds"),
        (["--elastic", "1:2", "--launcher-timeout", "0"], "--launcher-timeout is 0: give 1 second or more"),
        (
            ["--elastic", "1:2", "--where", "slurm", "--launcher-timeout", "9"],
            "not for --where slurm. Remove it.",
        ),
        (
            ["--elastic", "1:2", "--where", "mpi"],
            "--elastic does not work with --where mpi: an MPI job ends with its first dead rank",
        ),
        (["--elastic", "1:2", "--shardwise", "zero3"], "Use --max-restarts N instead of --elastic"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *options, __file__]) != 0
    assert words in capsys.readouterr().err


def test_one_report_says_which_ranks_died_and_which_continue() -> None:
    losses = (Loss(3, 3, "was killed by SIGKILL", 0, 1.0), Loss(1, 1, "was killed by SIGKILL", 0, 1.1))
    words = {3: "rank 3 computes", 1: ""}
    change = Change(losses, words, 0, 0, 2, step=120, seconds=0.05, num_starting=1, budget="2 of 3 within 600 s")
    assert change_report(change) == (
        "ranks 1, 3 were killed by SIGKILL. Last status: rank 3 computes. 2 ranks continue after step 120, 0.05 s "
        "later. 1 replacement starts (retries: 2 of 3 within 600 s)."
    )
    few = change_report(
        Change(losses[:1], {}, 0, 0, 2, 120, 0.05, num_starting=1, budget="2 of 3 within 600 s", least=3)
    )
    assert "2 ranks wait after step 120, 0.05 s later, for more: the job needs 3 (--elastic)." in few
    ended = change_report(Change((), {}, 0, 0, 2, 120, 0.0, 0, "0 of 3 within 600 s", ended=(1,)))
    assert ended == (
        "rank 1 ended with exit status 0, as at the end of a script, while others train: so no rank joins any more. 2 "
        "ranks continue after step 120."
    )
    alone = Change(losses[:1], {}, 0, 0, 2, 120, 0.05, 1, "2 of 3 within 600 s", num_spares=1)
    assert "2 ranks continue after step 120, 0.05 s later. 1 rank waits as a spare until" in change_report(alone)
    assert change_report(Change((), {}, 1, 1, 1, 7, 0.0, 0, "")) == (
        "1 rank left on request. 1 rank joined. 1 rank continues after step 7."
    )
    cause = Cause("network", "retry", (0, 2), (), "Ranks 0 and 2 could not reach each other.")
    assert change_report(Change((), {}, 0, 0, 3, 7, 0.0, 0, ""), cause) == (
        "the ranks have formed a new group. Cause: network: Ranks 0 and 2 could not reach each other. The step is "
        "repeated. 3 ranks continue after step 7."
    )


@pytest.mark.parametrize("leaving", [(1, 2), (0, 1, 2)])
def test_too_many_that_must_go_at_once_mean_the_end_of_all_together(leaving: tuple[int, ...]) -> None:
    job = Job(3, 2, 3)
    job.begin()
    for number in leaving:
        job.say(number, "leaving", 0, "must go")
    assert job.rendezvous.requests.needs_end
    job.rendezvous.requests.stop_together()  # what the launcher does before it asks all ranks to end
    for number in range(3):  # the first of them had been told that it may leave, so all come to the boundary
        job.say(number, "ready", 0)
    job.settle()
    assert job.rendezvous.state == "formed"
    assert job.rendezvous.members == (0, 1, 2)  # all of them are there to save
    assert not job.away


def test_one_that_must_go_after_the_others_have_reached_the_boundary_still_means_the_end_of_all() -> None:
    job = Job(3, 1, 3)
    job.begin()
    for number in (0, 1):
        job.say(number, "leaving", 0, "must go")
    for number in (0, 1):
        job.say(number, "ready", 0)
    job.say(2, "leaving", 0, "must go")
    assert job.rendezvous.requests.needs_end
    job.say(2, "ready", 0)  # read together with the message before it, when the launcher has not asked the ranks yet
    job.settle()
    assert job.rendezvous.members == (0, 1, 2)
    assert not job.away


def test_one_that_only_asks_stays_until_it_can_be_spared() -> None:
    job = Job(3, 3, 4)
    job.begin()
    job.say(1, "leaving", 0)
    assert not job.rendezvous.requests.needs_end
    assert job.announcements[-1].kind == "formed"
    job.start(3)  # room for one more: now it can go
    for number in range(3):
        job.say(number, "ready", 0)
    job.settle()
    assert job.rendezvous.members == (0, 2, 3)
    assert job.away == {1}


def test_two_hosts_are_not_drained_of_more_than_the_job_can_spare() -> None:
    job = Job(4, 2, 4)
    job.begin()
    assert job.rendezvous.can_spare({2, 3})
    job.rendezvous.send_away({2, 3})
    assert not job.rendezvous.can_spare({0, 1})  # though no member has answered yet


def test_scripts_that_end_well_before_they_join_are_no_loss() -> None:
    job = Job(3, 2, 3)
    for number in range(3):
        job.rendezvous.finished(number, 0.0)
    assert job.rendezvous.state == "gathering"
    job = Job(3, 2, 3)
    job.kill(0)
    job.rendezvous.finished(1, 0.0)
    job.rendezvous.finished(2, 0.0)
    assert job.rendezvous.state == "lost"


class GroupJob(Job):
    """Members that train in replica groups of two."""

    def begin(self) -> None:
        super().begin()
        for number in sorted(self.alive):
            self.say(number, "groups", text='[{"dp": 2, "tp": 2}]')

    def spares(self) -> list[tuple[int, ...]]:
        return [one.members for one in self.announcements if one.kind == "spare"]

    def all_get_ready(self) -> None:
        for number in self.rendezvous.members:
            self.say(number, "ready", self.rendezvous.generation)
        self.settle()


def test_a_replica_group_leaves_and_comes_back_with_its_spare() -> None:
    job = GroupJob(4, 2, 4)
    job.begin()
    job.lets_in = False
    job.kill(1)
    job.settle()
    assert (job.rendezvous.state, job.rendezvous.members) == ("formed", (2, 3))
    assert job.spares() == [(0,)]
    kinds = [one.kind for one in job.announcements]
    assert kinds.index("spare") < len(kinds) - kinds[::-1].index("entering"), "it does not take itself for lost"
    assert "wanted" not in kinds, "one alone is no group"
    job.start(4)
    assert job.announcements[-1].kind == "wanted"
    job.lets_in = True
    job.all_get_ready()
    assert (job.rendezvous.state, job.rendezvous.members) == ("formed", (2, 3, 0, 4))
    entering = [one for one in job.announcements if one.kind == "entering"][-1]
    assert entering.before == (2, 3), "so that the spare is a newcomer for the others"
    job.kill(3)
    job.settle()
    assert (job.rendezvous.members, job.spares()[-1]) == ((0, 4), (2,))


def test_a_member_that_leaves_on_request_takes_its_group_along() -> None:
    job = GroupJob(6, 2, 6)
    job.begin()
    job.say(0, "groups", text='[{"dp": 3, "tp": 2}]')
    job.say(3, "leaving")
    assert job.announcements[-1].kind == "wanted"
    job.all_get_ready()
    assert (job.rendezvous.members, job.spares(), job.away) == ((0, 1, 4, 5), [(2,)], {3})
    assert not job.rendezvous.can_spare((1, 4)), "nothing whole would be left"
    assert job.rendezvous.can_spare((1,))
    job.say(2, "leaving", text="must go")
    job.settle()
    assert job.away == {2, 3}, "a spare goes at once"


def test_a_spare_that_dies_concerns_nobody() -> None:
    job = GroupJob(4, 2, 4)
    job.begin()
    job.kill(0)
    job.settle()
    generation = job.rendezvous.generation
    job.kill(1)
    job.settle()
    assert (job.rendezvous.generation, job.rendezvous.state) == (generation, "formed")
    job.start(4)
    job.start(5)
    job.all_get_ready()
    assert job.rendezvous.members == (2, 3, 4, 5)


@pytest.mark.parametrize("killed", [(0, 2), (1, 2), (0, 1, 2)])
def test_without_a_whole_group_all_restart(killed: tuple[int, ...]) -> None:
    job = GroupJob(4, 1, 4)
    job.begin()
    for number in killed:
        job.kill(number)
    job.settle()
    assert job.rendezvous.state == "lost"
    assert job.rendezvous.needs_all
    assert job.announcements[-1].kind == "end"


def test_a_rank_that_dies_inside_shard_restarts_all_unless_others_go_on() -> None:
    """The others raise there, too; one that had come further goes on from the same first values."""
    job = Job(3, 1, 3)
    job.begin()
    job.kill(1)
    for number in (0, 2):
        job.say(number, "gives_up", job.rendezvous.generation, text="while it sharded")
        job.kill(number)
    assert job.rendezvous.state == "lost"
    assert job.rendezvous.gives_up
    assert job.rendezvous.given_up_when == "while it sharded"
    assert not job.rendezvous.needs_all

    job = Job(3, 1, 3)
    job.begin()
    job.kill(1)
    job.say(2, "gives_up", job.rendezvous.generation)
    job.kill(2)
    job.settle()
    assert (job.rendezvous.state, job.rendezvous.members) == ("formed", (0,))
    assert not job.rendezvous.gives_up


@pytest.mark.parametrize("seed", range(10))
def test_groups_in_any_order(seed: int) -> None:
    """Whoever dies, and whenever: members are whole groups, in the order of the mesh."""
    draw = random.Random(seed)
    job = GroupJob(6, 2, 6, can_grow=True)
    job.begin()
    job.say(0, "groups", text='[{"dp": 3, "tp": 2}]')
    job.lets_in = False
    part = {number: number % 2 for number in range(6)}
    for victim in draw.sample(range(6), 2):
        job.kill(victim)
        job.settle(draw if draw.random() < 0.5 else None)
    job.settle()
    members = job.rendezvous.members
    if job.rendezvous.state == "formed":
        assert len(members) in (2, 4)
        assert [part[number] for number in members] == [0, 1] * (len(members) // 2)
        assert all(members[at] + 1 == members[at + 1] for at in range(0, len(members), 2))


class OneGroup(Job):
    """Members that split layers over four ranks, over two, or over one."""

    def begin(self) -> None:
        super().begin()
        for number in sorted(self.alive):
            self.say(number, "groups", text='[{"tp": 4}, {"tp": 4}, {"tp": 2}, {"tp": 1}]')

    def all_get_ready(self) -> None:
        for number in self.rendezvous.members:
            self.say(number, "ready", self.rendezvous.generation)
        self.settle()


def test_a_group_goes_on_as_a_smaller_one_and_grows_again() -> None:
    job = OneGroup(4, 1, 4)
    job.begin()
    job.lets_in = False
    job.kill(1)
    job.settle()
    assert (job.rendezvous.state, job.rendezvous.members) == ("formed", (0, 2))
    assert [one.members for one in job.announcements if one.kind == "spare"] == [(3,)]
    assert job.announcements[-1].kind == "formed", "with three nothing larger is possible"
    assert job.rendezvous.can_spare((0,))
    job.start(4)
    assert job.announcements[-1].kind == "wanted"
    job.lets_in = True
    job.all_get_ready()
    assert (job.rendezvous.state, job.rendezvous.members) == ("formed", (0, 2, 3, 4))


EVERY, PREFERRED = '[{"tp": 4}, {"tp": 4}, {"tp": 2}, {"tp": 1}]', '[{"tp": 4}, {"tp": 4}, {"tp": 1}, {"tp": 2}]'


@pytest.mark.parametrize("first", ["groups", "prefers"])
def test_members_say_which_smaller_groups_they_prefer(first: str) -> None:
    """Whether the last of the others, which says which there are, is heard before it or after it."""
    job = OneGroup(4, 1, 4)
    job.begin()
    for number, kind in enumerate((first, "prefers" if first == "groups" else "groups")):
        job.say(number, kind, text=EVERY if kind == "groups" else PREFERRED)
    job.lets_in = False
    job.kill(1)
    job.settle()
    assert (job.rendezvous.state, job.rendezvous.members) == ("formed", (0,))


def test_members_that_prefer_another_mesh_than_they_are_on_go_on_from_it() -> None:
    """A rank was lost before the launcher had heard it."""
    axes = '{"tp": 8}, {"tp": 8}, {"tp": 2}, {"tp": 1}, {"tp": 4}'
    job = OneGroup(8, 1, 8)
    Job.begin(job)
    job.say(0, "groups", text='[{"tp": 8}, {"tp": 8}, {"tp": 4}, {"tp": 2}, {"tp": 1}]')
    job.lets_in = False
    job.kill(7)
    job.settle()
    assert job.rendezvous.members == (0, 1, 2, 3)
    job.say(0, "prefers", text=f"[{axes}]")
    job.kill(0)
    job.settle()
    assert (job.rendezvous.state, job.rendezvous.members) == ("formed", (1, 2))


def test_what_is_preferred_of_another_plan_counts_no_more() -> None:
    job = OneGroup(4, 1, 4)
    job.begin()
    job.say(0, "prefers", text='[{"pp": 4}, {"pp": 4}, {"pp": 1}, {"pp": 2}]')
    assert [*job.rendezvous.smaller] == [{"tp": 4}, {"tp": 2}, {"tp": 1}]


def test_with_a_smaller_group_too_small_for_the_job_it_waits_for_others() -> None:
    job = OneGroup(4, 3, 4, can_grow=True)
    job.begin()
    job.lets_in = False
    job.kill(1)
    job.settle()
    assert (job.rendezvous.state, job.rendezvous.members) == ("formed", (0, 2)), "the iteration is ended on two"
    assert [one.kind for one in job.announcements][-2:] == ["wanted", "formed"]
    job.lets_in = True
    generation = job.rendezvous.generation
    job.all_get_ready()
    assert job.rendezvous.generation == generation, "they stand until there are enough"
    job.start(4)
    job.settle()
    assert (job.rendezvous.state, job.rendezvous.members) == ("formed", (0, 2, 3, 4))


@pytest.mark.parametrize("seed", range(10))
def test_smaller_groups_in_any_order(seed: int) -> None:
    """Whoever dies, and whenever: as many go on as can, and all that have the state of the training are not forgotten
    for newcomers."""
    draw = random.Random(seed)
    job = OneGroup(4, 1, 4, can_grow=True)
    job.begin()
    job.lets_in = False
    victims = draw.sample(range(4), draw.randrange(1, 4))
    for victim in victims:
        job.kill(victim)
        job.settle(draw if draw.random() < 0.5 else None)
    job.settle()
    rendezvous = job.rendezvous
    if rendezvous.state == "formed":
        assert len(rendezvous.members) in (1, 2)
        assert not set(rendezvous.members) & set(victims)
