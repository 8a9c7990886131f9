"""Diagnosis of faults from what ranks report, without starting any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch.distributed import HashStore, PrefixStore

from shardwise.comm.watch.diagnosis import (
    Circle,
    GoneHost,
    Lateness,
    contradiction,
    departure,
    disappearance,
    judge,
    overdue,
)
from shardwise.comm.watch.fault import Fault
from shardwise.comm.watch.journal import in_words
from shardwise.comm.watch.status import Entered, PassPath, Status, Track
from shardwise.comm.watch.status_board import last_status

LINE = "dp 0-2/3"
RANKS = (0, 1, 2)
Reports = dict[int, Status]


def status(rank: int, tags: list[int], *, waits: int | None = None, line: str = LINE) -> Status:
    """A rank that has entered collectives with `tags` along `line`, and waits for number `waits` of them."""
    track = Track(len(tags), tuple(Entered(number, tag, f"'move {tag}'") for number, tag in enumerate(tags, 1)))
    return Status(
        rank,
        beat=1,
        state="waiting" if waits else "computing",
        moment="before forward h.1",
        unit="h.1",
        doing=f"move {tags[waits - 1]}" if waits else "",
        awaited=(line, waits, RANKS) if waits else None,
        tracks={line: track},
    )


def verdict(reports: list[Status], mine: int = 0) -> Fault | Circle | Lateness | None:
    by_rank: Reports = {report.rank: report for report in reports}
    return judge(by_rank[mine], by_rank.get)


def test_all_have_begun_so_it_is_on_its_way() -> None:
    assert verdict([status(rank, [1, 2], waits=2) for rank in RANKS]) is None


def test_a_rank_that_computes_is_late() -> None:
    finding = verdict([status(0, [1, 2], waits=2), status(1, [1, 2], waits=2), status(2, [1])])
    assert isinstance(finding, Lateness)
    assert finding.rank == 2
    assert [waiting.rank for waiting in finding.waiting] == [0, 1]
    text = finding.text(silent_seconds=0)
    assert text.startswith("rank 2 computes, last seen at 'before forward h.1', for 0 s. Because of it rank 0 waits in")
    assert "not been heard of for 40 s" in finding.text(silent_seconds=40)


def test_a_rank_that_reads_from_its_disk_is_late() -> None:
    """Which is no fault while the disk goes on, and reports come."""
    late = replace(status(2, []), on_disk=True, seconds=3.0)
    finding = verdict([status(0, [1], waits=1), status(1, [1], waits=1), late])
    assert isinstance(finding, Lateness)
    assert finding.is_served(timeout_seconds=4, silent_seconds=0)
    assert not finding.is_served(timeout_seconds=2, silent_seconds=0)
    assert not finding.is_served(timeout_seconds=4, silent_seconds=9)
    assert not replace(finding, status=replace(late, on_disk=False)).is_served(4, 0)
    assert not replace(finding, status=None).is_served(4, 0)
    text = finding.text(silent_seconds=0)
    assert text.startswith(
        "rank 2 reads from its disk or writes to it, last seen at 'before forward h.1'. Because of it rank 0 waits in"
    )


def test_a_rank_never_heard_of_is_late() -> None:
    finding = verdict([status(0, [1], waits=1), status(1, [1], waits=1)])
    assert isinstance(finding, Lateness)
    assert (finding.rank, finding.status) == (2, None)
    assert "rank 2 has not been heard of yet" in finding.text(0)


def test_other_histories_contradict_a_waiting_rank() -> None:
    """Rank 2 went another way at number 2, and computes on: it will never send what the others wait for."""
    finding = verdict([status(0, [1, 2, 3], waits=3), status(1, [1, 2], waits=2), status(2, [1, 7, 8, 9])])
    assert isinstance(finding, Fault)
    assert (finding.kind, finding.ranks, finding.unit) == ("contradiction", (2,), "h.1")
    assert "in collective 2 over dp, right after 'move 1'" in finding.text
    assert "rank 2 has 'move 7' there, and computes" in finding.text


def test_a_first_line_is_a_whole_sentence() -> None:
    """It is all that a launcher shows of the ranks that were not the first to fail."""
    other = "world 0-2/3"
    waiting = [status(0, [1], waits=1), status(1, [5], waits=1, line=other), status(2, [1], waits=1)]
    circle = verdict(waiting)
    assert isinstance(circle, Circle)
    clash = contradiction([status(0, [1, 2], waits=2), status(1, [1, 3], waits=2)], LINE)
    assert clash is not None
    left = departure(status(2, [1]).left("ValueError: bad"), waiting)
    for message in (circle.fault(), clash, left, replace(left, text=walked(["a", "b"], ["a", "c"]).text)):
        first, *rest = message.text.split("\n")
        assert first.endswith(".")
        assert "begun:" not in first
        assert all(line.endswith(".") for line in rest)


def walked(*ways: list[str]) -> Fault:
    """Ranks in a circle that have come these ways."""
    statuses = tuple(
        replace(status(rank, [1], waits=1), path=PassPath(3, 0, tuple((moment, f"unit {moment}") for moment in way)))
        for rank, way in enumerate(ways)
    )
    return Circle(statuses[:2]).fault(statuses)


def test_a_circle_of_ranks_that_went_different_ways_is_a_contradiction() -> None:
    message = walked(["a", "b", "d"], ["a", "c", "d"], ["a", "b"])
    assert (message.kind, message.ranks, message.unit) == ("contradiction", (1,), "unit b")
    assert "where ranks 0 and 2 came to 'b' and rank 1 came to 'c'." in message.text
    assert walked(["a", "b"], ["a"]).kind == "deadlock"
    assert Circle((status(0, [1], waits=1), status(1, [1], waits=1))).fault().kind == "deadlock"


def test_ways_are_compared_within_one_pass_and_as_far_as_they_are_remembered() -> None:
    one = replace(status(0, [1], waits=1), path=PassPath(3, 0, (("a", ""), ("b", ""))))
    another = replace(status(1, [1], waits=1), path=PassPath(4, 0, (("x", ""),)))
    assert Circle((one, another)).fault().kind == "deadlock"
    later = replace(another, path=PassPath(3, 1, (("b", ""), ("c", ""))))
    assert Circle((one, later)).fault().kind == "deadlock"
    assert Circle((one, replace(later, path=PassPath(3, 1, (("c", ""),))))).fault().kind == "contradiction"


@pytest.mark.parametrize("entered", [[1], [1, 2]], ids=["late", "begun"])
def test_a_rank_whose_reports_have_ended_is_late_whatever_it_said_last(entered: list[int]) -> None:
    """Rank 0 was stopped in a wait, and the lowest of those that hear nothing from it is to say so."""
    stopped = status(0, entered, waits=len(entered))
    reports = [stopped, status(1, [1, 2], waits=2), status(2, [1, 2], waits=2)]
    by_rank = {report.rank: report for report in reports}
    finding = judge(reports[1], by_rank.get, lambda rank: 9.0 if rank == 0 else 0.2)
    assert isinstance(finding, Lateness)
    assert finding.rank == 0
    assert [waiting.rank for waiting in finding.waiting] == [1, 2]
    assert finding.text(9.0).startswith("rank 0 has not been heard of for 9 s (stopped, or cut off): rank 0 waits in")
    assert judge(reports[1], by_rank.get, lambda _: 0.2) is None or entered == [1]


def test_a_rank_that_cannot_ask_does_not_say_that_all_have_begun() -> None:
    text = overdue(None, status(0, [1], waits=1), 0, 60, why="the store is gone (Broken pipe)").text
    assert "and the others cannot be asked: the store is gone (Broken pipe)." in text
    assert "all ranks have begun" not in text


def test_the_latest_world_has_the_last_word() -> None:
    """The tenth comes after the ninth."""
    store = HashStore()
    for world in (9, 10):
        PrefixStore(f"shardwise-watch/{world}", PrefixStore("attempt-0", store)).set(
            "status/1", replace(status(1, [1]), error=f"in world {world}").to_json()
        )
    assert "in world 10" in last_status(store, 1, "attempt-0")
    assert last_status(store, 2, "attempt-0") == ""


def test_without_a_majority_all_ranks_are_at_fault() -> None:
    finding = contradiction([status(0, [1], waits=1), status(1, [2], waits=1)], LINE)
    assert finding is not None
    assert finding.ranks == (0, 1)
    assert finding.text.startswith("Ranks 0 and 1 contradict each other")


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (range(8, 12), "8, 9, 10 and 11"),
        (range(8, 24), "8 to 23"),
        (range(0, 32, 2), "0, 2, 4, 6, 8, 10, 12, 14 and 8 more"),
    ],
)
def test_ranks_of_a_large_host_are_all_counted(ranks: Sequence[int], words: str) -> None:
    fault = disappearance(ranks[0], None, "Connection reset by peer.", status(0, [1]), GoneHost("node-2", tuple(ranks)))
    assert fault.text.startswith(f"Ranks {words}, all that were on node-2, are gone")


def test_two_collectives_of_one_library_function_are_told_apart() -> None:
    def entered(rank: int, tag: int, what: str) -> Status:
        track = Track(1, (Entered(1, tag, "train_step()", 8, 0, (), what),))
        return replace(status(rank, [], line=LINE), tracks={LINE: track}, call="train_step()")

    fault = contradiction([entered(0, 7, "exchange of room"), entered(1, 8, "all_reduce of verdict")], LINE)
    assert fault is not None
    assert "rank 0 has train_step() there (exchange of room), and" in str(fault)
    assert "rank 1 has train_step() there (all_reduce of verdict), and" in str(fault)
    for one in (entered(0, 7, "exchange of room"), entered(1, 8, "")):
        assert Status.from_json(one.to_json()) == one


def test_what_is_forgotten_is_not_compared() -> None:
    long = Track(40, tuple(Entered(number, number, "'x'") for number in range(9, 41)))
    far_ahead = replace(status(1, [1]), tracks={LINE: long})
    assert contradiction([status(0, [1, 2], waits=2), far_ahead], LINE) is None


def test_who_waits_for_a_late_rank_that_waits_is_not_alone() -> None:
    """0 waits for 1, which waits for 2 along another line; 2 computes."""
    other = "tp 1-2/2"
    one = replace(status(1, [5], waits=1, line=other), awaited=(other, 1, (1, 2)))
    finding = verdict(
        [status(0, [1], waits=1), one, replace(status(2, [1]), tracks={LINE: status(2, [1]).tracks[LINE]})]
    )
    assert isinstance(finding, Lateness)
    assert finding.rank == 2


def test_a_circle() -> None:
    other = "world 0-2/3"
    finding = verdict([status(0, [1], waits=1), status(1, [5], waits=1, line=other), status(2, [1], waits=1)])
    assert isinstance(finding, Circle)
    message = finding.fault()
    assert message.kind == "deadlock"
    assert set(message.ranks) == {0, 1}


def test_who_waits_for_a_circle_is_not_in_it() -> None:
    def waiting(rank: int, line: str, ranks: tuple[int, ...]) -> Status:
        return replace(status(rank, [1], waits=1, line=line), awaited=(line, 1, ranks))

    reports = [waiting(0, "a 0-1/2", (0, 1)), waiting(1, "b 1-2/2", (1, 2)), waiting(2, "c 1-2/2", (1, 2))]
    finding = verdict(reports)
    assert isinstance(finding, Circle)
    assert [one.rank for one in finding.statuses] == [1, 2]


def test_a_rank_that_raised_after_it_had_begun_is_not_waited_for() -> None:
    """It need not have sent its part."""
    finding = verdict([status(0, [1], waits=1), status(1, [1], waits=1), status(2, [1]).left("ValueError: bad")])
    assert isinstance(finding, Fault)
    assert (finding.kind, finding.ranks) == ("raised", (2,))


def test_a_rank_that_has_left_is_named_with_its_words() -> None:
    for error, kind, words in (
        ("ValueError: bad", "raised", "Rank 2 raised ValueError: bad"),
        ("", "ended", "has ended"),
        ("", "ended", "give all ranks equally many batches"),
    ):
        finding = verdict([status(0, [1, 2], waits=2), status(1, [1, 2], waits=2), status(2, [1]).left(error)])
        assert isinstance(finding, Fault)
        assert (finding.kind, finding.ranks) == (kind, (2,))
        assert words in finding.text


def test_a_rank_that_left_in_good_order_is_no_fault() -> None:
    """It has sent its part; what is on its way arrives."""
    assert verdict([status(0, [1], waits=1), status(1, [1], waits=1), status(2, [1]).left("")]) is None


def test_reports_and_faults_survive_serialization() -> None:
    report = status(1, [1, 2], waits=2)
    assert Status.from_json(report.to_json()) == report
    message = disappearance(2, report, "Connection reset by peer.", report)
    assert Fault.from_json(message.to_json()) == message
    late = Lateness(2, None, (report,))
    error = overdue(late, report, 0, 600).error()
    assert (error.kind, error.ranks) == ("timeout", (2,))
    assert str(error).startswith("Timeout of 600 s: rank 2 has not been heard of yet")


def test_stages_of_a_pipeline_may_go_other_ways() -> None:
    """Ranks that wait for each other in a circle are not told that their ways part where they have other parts."""
    there = {"stage 0": (("before forward h.0", "h.0"),), "stage 1": (("before forward h.3", "h.3"),)}
    statuses = tuple(
        Status(rank, state="waiting", path=PassPath(1, 0, moments, part))
        for rank, (part, moments) in enumerate(there.items())
    )
    assert Circle(statuses).fault().kind == "deadlock"
    same = tuple(replace(one, path=one.path._replace(part="")) for one in statuses)
    assert Circle(same).fault().kind == "contradiction"
    assert Status.from_json(statuses[1].to_json()) == statuses[1]


def test_an_error_that_cannot_say_what_it_is_is_reported_all_the_same() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert in_words(Mute()) == "Mute: <exception str() failed>"
    assert in_words(ValueError("two\nlines")) == "ValueError: two"
    assert (
        in_words(ValueError("\x1b]0;title\x07"))
        == "ValueError: \N{REPLACEMENT CHARACTER}]0;title\N{REPLACEMENT CHARACTER}"
    )
