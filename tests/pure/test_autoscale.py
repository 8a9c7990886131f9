"""`--autoscale`: how many ranks a job asks for, on a clock that the tests turn, in a cluster that admits what a trace
says."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.launch.autoscale import (
    Fill,
    Gain,
    Patience,
    Policy,
    Rate,
    Schedule,
    Seen,
    Sizes,
    State,
    decide,
    describe_policy,
    first_size,
    parse_policy,
)
from tests.admissions import DAY_SECONDS, one_day, slots_at
from tests.thorough import drawn, sampled, varies

MONDAY = datetime(2026, 11, 30, tzinfo=UTC)
WINDOW_SECONDS = 20.0
"""Until the ranks of a size are measured."""


def amdahl(serial: float, per_rank: float = 0.0) -> Callable[[int], float]:
    """Steps per second of a step with a serial share, and a cost that grows with the ranks."""
    return lambda size: 1 / (serial + (1 - serial) / size + per_rank * (size - 1))


@dataclass
class Cluster:
    """A job whose ranks come `delay` seconds after they were asked for, as far as the trace of (second, slots) admits
    them at the time; those that are admitted no longer are gone at once."""

    policy: Policy
    sizes: Sizes
    speed: Callable[[int], float]
    trace: Sequence[tuple[float, int]] = ((0.0, 10**6),)
    wanted: int = 0
    predicted: dict[int, float] = field(default_factory=dict)
    all_or_nothing: bool = False
    delay: float = 5.0
    is_measured: bool = True
    room: int | None = None
    now: float = 0.0
    tick: float = 1.0
    """How often the policy is asked, in seconds."""
    factor: Callable[[float], float] | None = None
    """By how much more than `speed` says the ranks do at a time, in windows each of which is twice as long as the last
    one. Without, they are measured at each tick."""
    error: float = 0.001
    """Of a window, as it is given."""
    asked: list[tuple[float, int, str]] = field(default_factory=list)
    course: list[tuple[float, int]] = field(default_factory=list)

    def run(self, seconds: float) -> Cluster:
        state = State(self.wanted or self.sizes.first)
        rate: Rate | None = None
        asked_at, size, due, window = -self.delay, 0, 0.0, WINDOW_SECONDS
        for _ in range(int(seconds / self.tick)):
            self.now += self.tick
            slots = slots_at(self.trace, self.now)
            come = state.wanted if state.wanted <= slots else size if self.all_or_nothing else slots
            come = min(come, slots) // self.sizes.unit * self.sizes.unit
            if come != size and (come < size or self.now >= asked_at + self.delay):
                size, rate = come, None
                due, window = self.now + WINDOW_SECONDS, 2 * WINDOW_SECONDS
                self.course.append((self.now, size))
            if self.is_measured and self.now >= due and size:
                factor = 1.0 if self.factor is None else self.factor(self.now)
                rate = Rate(size, self.speed(size) * factor, self.error, self.now)
                due, window = (self.now if self.factor is None else self.now + window), min(2 * window, 600.0)
            utc = MONDAY + timedelta(seconds=self.now)
            seen = Seen(self.now, utc, size, rate, self.predicted, self.room)
            before, state = state, decide(self.policy, self.sizes, state, seen)
            if state.wanted != before.wanted:
                self.asked.append((self.now, state.wanted, state.why))
                asked_at = self.now
        self.state = state
        return self

    @property
    def wishes(self) -> list[int]:
        return [size for _, size, _ in self.asked]

    @property
    def size(self) -> int:
        return self.course[-1][1]


def test_fill_takes_what_is_admitted_by_twice_as_many_at_a_time() -> None:
    job = Cluster(Fill(), Sizes(8, 128, 8), amdahl(0.0)).run(2000)
    assert job.wishes == [16, 32, 64, 120, 128] or job.wishes == [16, 32, 64, 128]
    assert job.size == 128
    assert job.asked[0][2] == "8 ranks train at 8 steps/s, and there may be room for more"


@pytest.mark.parametrize("all_or_nothing", [False, True])
def test_fill_asks_for_less_where_a_request_is_not_admitted_as_a_whole(all_or_nothing: bool) -> None:
    """Kueue admits all pods of a request, or none; with the scheduler alone some of them come."""
    trace = [(0.0, 8 + 16 + 16)]
    job = Cluster(Fill(), Sizes(8, 256, 8), amdahl(0.0), trace, all_or_nothing=all_or_nothing).run(4000)
    assert job.size == 40
    assert job.wishes[-1] == 48, "one more host waits for room"
    waited = "5 minutes" if all_or_nothing else "60 minutes"
    assert any(f"came within {waited}, so fewer are asked for" in why for _, _, why in job.asked)


def test_what_was_not_admitted_as_a_whole_is_not_asked_for_again_at_once() -> None:
    """Of 12, 16 were too many. They wait, and come when there is room; then the job grows on from there."""
    trace = [(0.0, 12), (3000.0, 40)]
    job = Cluster(Fill(), Sizes(4, 64, 4), amdahl(0.0), trace, all_or_nothing=True)
    job.run(2990)
    assert job.wishes == [8, 16, 12, 16]
    job = Cluster(Fill(), Sizes(4, 64, 4), amdahl(0.0), trace, all_or_nothing=True).run(6000)
    assert job.size == 40


def test_a_trace_of_grow_and_shrink_gives_the_sizes_that_it_admits() -> None:
    """Quota comes, goes (pods are preempted) and comes again. Nothing is asked for below what trains."""
    trace = [(0.0, 16), (900.0, 48), (2400.0, 24), (3600.0, 24), (5000.0, 64)]
    job = Cluster(Fill(), Sizes(8, 64, 8), amdahl(0.01), trace).run(8000)
    ends = [next(size for at, size in reversed(job.course) if at < until) for until in (900, 2400, 5000, 8000)]
    assert ends == [16, 48, 24, 64]


@dataclass(frozen=True)
class Use:
    """What a job has of a recorded day, in rank-seconds."""

    had: float
    admitted: float

    @classmethod
    def of(cls, job: Cluster, trace: Sequence[tuple[float, int]], most: int) -> Use:
        """Raises `AssertionError` if it has ever had more than was admitted."""
        moments = sorted({at for at, _ in (*job.course, *trace)} | {job.now})
        had = admitted = 0.0
        for at, end in pairwise(moments):
            sizes = [size for since, size in job.course if since <= at][-1:]
            slots = slots_at(trace, max(0.0, at))
            size = sizes[0] if sizes else 0
            assert size <= slots or end - at < job.tick, (at, size, slots)
            had, admitted = had + size * (end - at), admitted + min(slots, most) * (end - at)
        return cls(had, admitted)


@pytest.mark.parametrize("all_or_nothing", [False, True])
def test_fill_has_nearly_all_that_a_recorded_day_admits(all_or_nothing: bool) -> None:
    """A day of a production cluster, of which GPUs are granted and taken away 72 times: see the fixture."""
    trace = one_day()
    job = Cluster(Fill(), Sizes(4, 32, 4), amdahl(0.0), trace, all_or_nothing=all_or_nothing, tick=10.0)
    use = Use.of(job.run(DAY_SECONDS), trace, 32)
    assert use.had > 0.98 * use.admitted
    _never_slower_for_long(job)


@sampled
@pytest.mark.parametrize("is_predicted", [False, True])
def test_gain_has_of_a_recorded_day_what_is_worth_having(is_predicted: bool) -> None:
    """Of more than 16 ranks each does less than its share. Predicted, they are never asked for; measured, they are
    tried and given back within a window, again and again, after longer and longer."""
    trace, speed = one_day(), amdahl(0.02)
    assert speed(16) / 16 > 0.76 > speed(20) / 20
    predicted = {size: 1 / speed(size) for size in range(1, 33)} if is_predicted else {}
    alone = 1.0 if is_predicted else speed(4) / 4  # as far as is known
    policy = Gain(0.76 / alone)
    job = Cluster(policy, Sizes(4, 32, 4), speed, trace, predicted=predicted, tick=10.0).run(DAY_SECONDS)
    use = Use.of(job, trace, 16)
    assert use.had > 0.98 * use.admitted
    too_many = [(at, size) for at, size in job.course if size > 16]
    if is_predicted:
        assert not too_many
    else:
        assert {size for _, size in too_many} == {20}
        assert any("each of 20 ranks is only " in why for _, _, why in job.asked)
        ends = dict(zip(job.course, [at for at, _ in job.course[1:]] + [job.now], strict=True))
        assert all(ends[one] - one[0] <= WINDOW_SECONDS + job.delay + 2 * job.tick for one in too_many)
    _never_slower_for_long(job)


def test_ranks_that_slow_the_others_down_are_given_back_and_not_asked_for_again_for_longer_and_longer() -> None:
    """Sizes are compared as measured: tokens per second are never lower for long after growing than before."""
    speed = amdahl(0.0, per_rank=0.02)  # the fastest are 7 ranks
    job = Cluster(Fill(), Sizes(4, 32, 4), speed).run(12000)
    assert job.wishes[:3] == [8, 16, 8]
    assert "16 ranks is less than 5.02 steps/s with 8; not tried again for 2 hours" in job.asked[2][2].replace(
        f"{speed(8):.3g}", "5.02"
    )
    tries = [at for at, size, _ in job.asked if size > 8]
    gaps = [later - sooner for sooner, later in pairwise(tries)]
    assert gaps == sorted(gaps)
    assert len(tries) <= 6
    assert job.size <= 12
    _never_slower_for_long(job)


def test_gain_without_a_prediction_grows_by_what_fewer_ranks_have_shown_and_tries_the_next_one() -> None:
    speed = amdahl(0.05)  # 8 ranks: 74 %, 12: 65 %
    job = Cluster(Gain(0.7), Sizes(1, 64, 1), speed).run(3000)
    assert job.size == 9
    assert speed(9) / 9 >= 0.7 > speed(10) / 10
    assert any(f"each of 10 ranks is only {speed(10) / 10:.0%} as fast as one alone" in why for _, _, why in job.asked)
    assert job.wishes == [2, 4, 8, 9, 10, 9]


def test_gain_with_a_prediction_does_not_try_what_is_not_worth_it() -> None:
    speed = amdahl(0.05)
    predicted = {size: 3 / speed(size) for size in range(1, 65)}  # three times too slow, at all sizes
    job = Cluster(Gain(0.7), Sizes(1, 64, 1), speed, predicted=predicted).run(3000)
    assert job.wishes == [2, 4, 8, 9]
    assert (
        job.asked[-1][2]
        == f"8 ranks train at {speed(8):.3g} steps/s; with 9 each is expected to do 71% of what one would alone"
    )


def test_gain_goes_back_where_the_measurement_contradicts_the_prediction() -> None:
    speed, believed = amdahl(0.2), amdahl(0.0)
    predicted = {size: 1 / believed(size) for size in range(1, 65)}
    job = Cluster(Gain(0.7), Sizes(1, 64, 1), speed, predicted=predicted).run(2000)
    assert job.wishes[:4] == [2, 4, 2, 3]
    assert job.size == 3
    assert speed(3) / 3 >= 0.7 > speed(4) / 4


def test_gain_shrinks_a_job_that_began_too_large() -> None:
    speed = amdahl(0.1)
    predicted = {size: 1 / speed(size) for size in range(1, 65)}
    job = Cluster(Gain(0.5), Sizes(2, 64, 2), speed, wanted=32, predicted=predicted).run(600)
    assert job.wishes == [10]
    assert speed(10) / 10 >= 0.5 > speed(12) / 12


def test_a_loop_that_measures_nothing_fills_but_gains_nothing() -> None:
    assert Cluster(Fill(), Sizes(2, 8, 2), amdahl(0.0), is_measured=False).run(4000).size == 8
    assert Cluster(Gain(0.1), Sizes(2, 8, 2), amdahl(0.0), is_measured=False).run(4000).wishes == []


def test_no_more_is_asked_for_than_there_are_slots() -> None:
    job = Cluster(Fill(), Sizes(2, 64, 2), amdahl(0.0), room=7).run(4000)
    assert (job.size, job.wishes[-1]) == (6, 6)


def test_a_size_that_somebody_else_has_asked_for_is_taken_over() -> None:
    state = State(8, size=8)
    more = decide(Fill(), Sizes(8, 64, 8), state, Seen(10.0, MONDAY, 24))
    assert (more.wanted, more.why) == (24, "24 ranks train, more than the 8 that were asked for")
    leaving = decide(Fill(), Sizes(8, 64, 8), State(8, size=32), Seen(10.0, MONDAY, 24))
    assert leaving.wanted == 8, "they are about to leave"


def test_a_difference_within_the_errors_of_measurement_decides_nothing() -> None:
    patience = Patience(settle=10**9)
    for error, wanted in ((0.1, 8), (0.001, 4)):
        rates = {4: Rate(4, 10.0, error, 1.0)}
        state = State(8, size=8, came_at=5.0, before=4, rates=rates)
        seen = Seen(30.0, MONDAY, 8, Rate(8, 9.7, error, 29.0))
        assert decide(Fill(), Sizes(4, 8, 4), state, seen, patience).wanted == wanted


@varies
@settings(max_examples=drawn(15, 100))
@given(
    st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 80)), max_size=6),
    st.floats(0.0, 0.3),
    st.floats(0.0, 0.05),
    st.sampled_from([Fill(), Gain(0.5), Gain(0.9)]),
    st.booleans(),
    st.integers(1, 8),
)
def test_whatever_is_admitted_sizes_are_possible_ones_and_no_growth_that_slows_it_down_stays(
    trace: list[tuple[int, int]], serial: float, per_rank: float, policy: Policy, all_or_nothing: bool, unit: int
) -> None:
    sizes = Sizes(unit, 64, unit)
    admitted = [(0.0, 64), *((float(at), slots) for at, slots in sorted(trace))]
    job = Cluster(policy, sizes, amdahl(serial, per_rank), admitted, all_or_nothing=all_or_nothing).run(1500)
    assert all(size in sizes for size in job.wishes)
    assert job.wishes == [size for n, size in enumerate(job.wishes) if n == 0 or size != job.wishes[n - 1]]
    _never_slower_for_long(job)


@sampled
@pytest.mark.parametrize("policy", [Fill(), Gain(0.5)], ids=str)
@pytest.mark.parametrize("begins_high", [False, True])
@pytest.mark.parametrize("all_or_nothing", [False, True])
@pytest.mark.parametrize("seconds", [90, 400, 900, 1200, 1500, 1800, 3600])
def test_a_quota_that_swings_is_not_followed_with_each_swing(
    seconds: int, all_or_nothing: bool, begins_high: bool, policy: Policy
) -> None:
    """For four hours it is 12 and 32 in turns. The ranks that trained are asked for, and come with each swing."""
    trace = [(float(at), 32 if (at // seconds + begins_high) % 2 else 12) for at in range(0, 4 * 3600, seconds)]
    job = Cluster(policy, Sizes(4, 64, 4), amdahl(0.01), trace, all_or_nothing=all_or_nothing, tick=10.0)
    job.run(4 * 3600)
    assert len(job.asked) <= 8, job.asked
    if not all_or_nothing and not begins_high and seconds >= 900:
        assert job.wishes[:4] == [8, 16, 32, 64], "of which the rest waits"
    assert {size for _, size in job.course[-6:]} >= {12, 32}
    use = Use.of(job, trace, 64)
    assert use.had > 0.97 * use.admitted
    _never_slower_for_long(job)


@varies
@pytest.mark.parametrize("policy", [Fill(), Gain(0.5)], ids=str)
def test_a_quota_that_goes_on_to_swing_is_asked_for_no_more(policy: Policy) -> None:
    """Of 8 requests in 12 hours the first ones explore it."""
    trace = [(3600.0 * hour, 32 if hour % 2 else 12) for hour in range(12)]
    job = Cluster(policy, Sizes(4, 64, 4), amdahl(0.01), trace, all_or_nothing=True, tick=30.0).run(12 * 3600)
    assert len(job.asked) <= 8, job.asked
    use = Use.of(job, trace, 64)
    assert use.had > 0.99 * use.admitted


def test_what_was_granted_for_long_is_expected_to_last_and_more_is_asked_for_soon() -> None:
    trace = [(0.0, 32), (36_000.0, 12), (36_400.0, 64)]
    job = Cluster(Fill(), Sizes(4, 64, 4), amdahl(0.01), trace, all_or_nothing=True, tick=10.0).run(41_000)
    assert job.size == 64


def test_a_gap_that_ended_in_part_the_last_time_is_not_expected_to_end_as_a_whole() -> None:
    """Of 32 ranks 12 are left, and 20 come back; the next time all do, which says that all will once more."""
    hours = [32, 12, 20, 32, 12, 32, 12, 20]
    trace = [(3600.0 * hour, slots) for hour, slots in enumerate(hours)]
    job = Cluster(Fill(), Sizes(4, 32, 4), amdahl(0.0), trace, all_or_nothing=True, tick=10.0).run(8 * 3600)
    asked = [[wish for at, wish, _ in job.asked if 3600 * hour <= at < 3600 * (hour + 1)] for hour in range(8)]
    assert asked[1] == [16], "after a while"
    assert asked[4] == [16], "the last one ended in part"
    assert asked[6] == [], "the last one ended at once"


def test_one_rank_that_is_replaced_changes_no_request() -> None:
    """What waits for room goes on to, and no size is held."""
    trace = [(0.0, 32), *((at + more, 32 - 4 * (not more)) for at in (1000.0, 2000.0, 3000.0) for more in (0.0, 20.0))]
    job = Cluster(Fill(), Sizes(4, 64, 4), amdahl(0.0), trace).run(4000)
    assert job.wishes == [8, 16, 32, 64, 36]


@varies
@sampled
@pytest.mark.parametrize("error", [0.058, 0.02])
@pytest.mark.parametrize("is_predicted", [False, True])
def test_a_noisy_job_at_the_limit_neither_grows_nor_shrinks_for_ever(is_predicted: bool, error: float) -> None:
    """Of 9 ranks each does 71 %, of 10 69 %, and windows vary by 10 %, also where they say that it is less."""
    speed = amdahl(0.05)
    predicted = {size: 1 / speed(size) for size in range(1, 65)} if is_predicted else {}
    for seed in range(drawn(2, 6)):
        numbers = random.Random(seed)
        job = Cluster(Gain(0.7), Sizes(1, 64, 1), speed, predicted=predicted, tick=10.0, error=error)
        job.factor = lambda _, numbers=numbers: numbers.uniform(0.9, 1.1)
        job.run(8 * 3600)
        first = next((place for place, size in enumerate(job.wishes) if size >= 9), len(job.wishes))
        assert len(job.wishes[first + 1 :]) <= 4, (seed, job.wishes)
        assert 0.6 < speed(job.size) / job.size < 0.8, (seed, job.wishes)


@pytest.mark.parametrize("share", [0.02, 0.1, 0.3])
def test_a_day_on_which_all_sizes_become_slower_and_faster_changes_few(share: float) -> None:
    """Within the hour, by what others do on the same machines."""
    speed = amdahl(0.05)
    job = Cluster(Gain(0.7), Sizes(1, 64, 1), speed, tick=10.0)
    job.factor = lambda now: 1 + share * math.sin(now / 600)
    job.run(12 * 3600)
    back = [later for sooner, later in pairwise(job.wishes) if later < sooner]
    assert len(back) <= 3, job.wishes


def _never_slower_for_long(job: Cluster) -> None:
    """A size that the job has grown to itself, and is slower than the one before, is left within a window."""
    ends = [at for at, _ in job.course[1:]] + [job.now]
    for (_, before), (at, size), end in zip(job.course, job.course[1:], ends[1:], strict=False):
        asked = [wish for when, wish, _ in job.asked if when < at][-1:]
        slower = job.speed(size) * 1.02 < job.speed(before) * 0.98 if before and size else False
        if asked == [size] and size > before and slower and end < job.now:
            assert end - at <= WINDOW_SECONDS + job.delay + 2 * job.tick, (before, size)


# -- schedules --------------------------------------------------------------------------------------------

WEEK = """
# nights and weekends
mon-fri 08:00 8
mon-fri 20:00 32   # until the next morning
sat 00:00 64
"""


def test_a_schedule_is_followed_through_the_week(tmp_path: Path) -> None:
    path = tmp_path / "week"
    path.write_text(WEEK)
    policy = parse_policy(f"schedule:{path}")
    assert isinstance(policy, Schedule)
    at = {
        (0, 7): 64, (0, 8): 8, (0, 19): 8, (0, 20): 32, (1, 7): 32, (4, 23): 32, (5, 0): 64, (6, 23): 64,
    }  # fmt: skip
    for (day, hour), size in at.items():
        assert (
            policy.entry_at(MONDAY + timedelta(days=day, hours=hour, minutes=59 if hour in (7, 19, 23) else 0))[1]
            == size
        )
    assert parse_policy(str(policy)) == policy, "so it is passed on to a launcher elsewhere"


BERLIN = "timezone Europe/Berlin; 02:30 4; 08:00 8; 20:00 2"


def test_a_schedule_in_a_time_zone_is_that_of_its_clocks() -> None:
    """Clocks go forward on 29 March at 1:00 UTC, from 2:00 to 3:00, and back on 25 October at 1:00, from 3:00 to 2:00:
    what begins at 2:30 begins once."""
    policy = parse_policy(f"schedule:{BERLIN}")
    assert isinstance(policy, Schedule)
    assert parse_policy(str(policy)) == policy
    assert policy.in_words().startswith("by the time of the week (Europe/Berlin): ")
    for month, day, times in (
        (3, 28, {(1, 29): 2, (1, 30): 4, (6, 59): 4, (7, 0): 8, (19, 0): 2}),
        (3, 29, {(0, 59): 2, (1, 0): 4, (5, 59): 4, (6, 0): 8, (18, 0): 2}),
        (10, 25, {(0, 29): 2, (0, 30): 4, (1, 0): 4, (1, 29): 4, (1, 59): 4, (2, 0): 4, (7, 0): 8, (19, 0): 2}),
    ):
        for (hour, minute), size in times.items():
            assert policy.entry_at(datetime(2026, month, day, hour, minute, 30, tzinfo=UTC))[1] == size, (day, hour)
    for month, day in ((3, 28), (10, 24)):
        begin = datetime(2026, month, day, 12, tzinfo=UTC)
        sizes = [policy.entry_at(begin + timedelta(minutes=5 * n))[1] for n in range(2 * 24 * 12)]
        assert sum(one != other for one, other in pairwise(sizes)) == 6, "three a day"


def test_a_later_line_of_a_schedule_counts_and_one_that_has_no_effect_is_refused() -> None:
    policy = parse_policy("schedule:mon-fri 08:00 16; wed 08:00 4; fri-mon 20:00 32")
    assert isinstance(policy, Schedule)
    days = [policy.entry_at(MONDAY + timedelta(days=day, hours=9))[1] for day in range(7)]
    assert days == [16, 16, 4, 16, 16, 32, 32]
    for text, words in (
        ("wed 08:00 4; mon-fri 08:00 16", "'wed 08:00 4' has no effect: --autoscale schedule: 'mon-fri 08:00 16' has"),
        ("08:00 16; 08:00 8", "'08:00 16' has no effect"),
        ("timezone Mars/Base; 08:00 8", "'timezone Mars/Base': there is no such time zone here"),
        ("timezone ../UTC; 08:00 8", "there is no such time zone here"),
        ("timezone UTC", "has no times"),
    ):
        with pytest.raises(ConfigError) as refused:
            parse_policy(f"schedule:{text}")
        assert words in str(refused.value)


def test_a_schedule_within_the_limits_says_what_is_nearest() -> None:
    policy = parse_policy("schedule:00:00 6; 00:10 100; 00:20 1")
    job = Cluster(policy, Sizes(4, 32, 4), amdahl(0.5), wanted=4).run(1800)
    assert job.wishes == [32, 4]
    assert job.asked[0][1:] == (32, "the schedule has 100 from mon 00:10; of the possible sizes 32 is the nearest")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("grow", "--autoscale grow: give fill, gain:0.7 or schedule:FILE."),
        ("fill:3", "give fill, gain:0.7"),
        ("gain", "more than 0 and at most 1, such as gain:0.7"),
        ("gain:1.5", "more than 0 and at most 1"),
        ("gain:nan", "more than 0 and at most 1"),
        ("schedule:", "give fill"),
        ("schedule:nowhere.txt", "the file cannot be read (No such file or directory). Give one with lines such as"),
        ("schedule:08:00 8; mon 25:00 8", "'mon 25:00 8' is not understood. Write days, time and ranks"),
        ("schedule:08:00 8; moon 05:00 8", "'moon 05:00 8' is not understood"),
        ("schedule:mon-xyz 05:00 8", "is not understood"),
        ("schedule:08:00 0", "a job needs at least one rank"),
    ],
)
def test_what_is_no_policy_is_refused_with_words_that_help(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_policy(text)
    assert words in str(refused.value)


def test_a_file_is_refused_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "week"
    path.write_text("mon 08:00 8\nmon 09:00 many\n")
    with pytest.raises(ConfigError, match=r"week, line 2: 'mon 09:00 many' is not understood"):
        parse_policy(f"schedule:{path}")
    path.write_text("# nothing\n")
    with pytest.raises(ConfigError, match="has no times"):
        parse_policy(f"schedule:{path}")


def test_what_a_job_begins_with_and_what_a_dry_run_says() -> None:
    sizes = Sizes(3, 30, 4)
    assert list(sizes) == [4, 8, 12, 16, 20, 24, 28]
    firsts = [first_size(policy, sizes, 18, MONDAY) for policy in (Fill(), Gain(0.7), parse_policy("schedule:00:00 9"))]
    assert firsts == [16, 4, 8]
    assert describe_policy(Gain(0.7), sizes, 4, "the list") == (
        "autoscale gain:0.7: more ranks while each is at least 70% as fast as one rank alone\n"
        "  4 to 28 ranks in steps of 4; it begins with 4; more come from the list"
    )
    with pytest.raises(ConfigError, match="--elastic 5:7 has no multiple of 8"):
        Sizes(5, 7, 8).check()
