"""How many ranks an elastic job should have: the policies of `--autoscale`. Pure.

`decide` takes a policy, the sizes that are possible, the state so far, and what is seen, the time included; it returns
the next state, which has the number of ranks to ask for and the reason in words. What asks, and whom, is in
`elastic/scaling.py`.

[Note: growing] The job grows from a size at which it trains, and by at most as many ranks again as came last time: a
cluster may admit a request as a whole or not at all, and each size is measured before it is left. What has not come
after a while is given up for one host more than there are, so that a smaller request can be admitted; that waits, and
from there the job grows as before, and to as much again only when ranks have come late, as then the room has changed.
Where a part of a request has come, and stayed a part, the cluster admits ranks one by one, and the request waits as it
is.

[Note: shrinking back] Two sizes are compared by steps per second, which at one global batch is tokens per second, and
only where the difference is more than two standard errors of each, of all that was measured lately at that size.

[Note: hysteresis] A job at a limit would grow and shrink for ever, and each change costs it a void iteration, and a
cluster pods that come and go. So

- a size that did not pay is not asked for again for a while, which is four times as long each time;
- a size is on trial while it is new. Later it is left only where it does less than 0.9 of what it should: all sizes may
  have become slower or faster meanwhile, and what others did is known from then. (So is the tolerance of Kubernetes'
  HorizontalPodAutoscaler, 0.1, and its window of stabilization, 300 s.);
- `gain` grows only from a size that does its share by more than a standard error, in two windows or more;
- where ranks are taken away, as many as trained are asked for again, and no less for a while; nor more, until as many
  have trained for as long: twice as long each time that they are taken from that size, or that it has asked for more
  in vain, until more than that have trained. Then the next host is asked for, and waits; and from fewer, that size
  again at once, as it has been measured. A quota that swings would otherwise be followed, and explored, with each
  swing;
- a grant, and a gap between two, is expected to last as long as the last one. What would soon be of no use is not asked
  for before that has lasted half as long again: more than have ever come, if they were waited for in vain throughout
  the last grant; and fewer than trained, if all came back at once from as few the last time.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from shardwise.errors import ConfigError
from shardwise.system.even_parts import round_up
from shardwise.system.safe_files import read_config_text

_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_ENTRY = re.compile(r"(?:([a-z]{3})(?:-([a-z]{3}))?\s+)?(\d{1,2}):(\d{2})\s+(\d{1,7})")
_ZONE = re.compile(r"timezone\s+([^\s;]+)")
_WEEK_MINUTES = 7 * 24 * 60
_NUM_WINDOWS = 6
_LEAST_ERROR = 1e-4
"""Of a window: steps that all take as long to the clock's resolution say no more than that."""
_TOLERANCE = 0.1
_FORMS = "fill, gain:0.7 or schedule:FILE"


@dataclass(frozen=True)
class Fill:
    """As many ranks as are admitted."""

    def __str__(self) -> str:
        return "fill"

    def in_words(self) -> str:
        return "as many ranks as are admitted, while more of them are not slower"


@dataclass(frozen=True)
class Gain:
    """More ranks while each still does at least `share` of what one rank alone would do."""

    share: float

    def __str__(self) -> str:
        return f"gain:{self.share:g}"

    def in_words(self) -> str:
        return f"more ranks while each is at least {self.share:.0%} as fast as one rank alone"


@dataclass(frozen=True)
class Schedule:
    """Sizes by the time of the week in `zone`: the minute (from Monday 0:00) from which each is wanted, in order."""

    entries: tuple[tuple[int, int], ...]
    zone: str = "UTC"

    def __str__(self) -> str:
        zone = "" if self.zone == "UTC" else f"timezone {self.zone}; "
        return f"schedule:{zone}" + "; ".join(f"{_time_in_words(minute)} {size}" for minute, size in self.entries)

    def in_words(self) -> str:
        sizes = "; ".join(f"{size} from {_time_in_words(minute)}" for minute, size in self.entries)
        return f"by the time of the week ({self.zone}): {sizes}"

    def entry_at(self, time: datetime) -> tuple[int, int]:
        """The entry that is in effect at a `time` in UTC. Where clocks go forward, the entries of the hour that there
        is not begin with the next one; where they go back, what has begun in the hour that comes twice stays."""
        zone = ZoneInfo(self.zone)
        while (local := time.astimezone(zone)).fold:  # clocks were put back: they have shown as much as just before
            time -= timedelta(minutes=1)
        now = (local.weekday() * 24 + local.hour) * 60 + local.minute
        return max(self.entries, key=lambda entry: (entry[0] - now - 1) % _WEEK_MINUTES)


Policy = Fill | Gain | Schedule


def parse_policy(text: str) -> Policy:
    """The policy that `--autoscale` names. Raises `ConfigError`."""
    name, _, value = text.partition(":")
    if text == "fill":
        return Fill()
    if name == "gain":
        return Gain(_share_of(value))
    if name == "schedule" and value:
        return _schedule_of(value)
    raise ConfigError(f"--autoscale {text}: give {_FORMS}.")


def _share_of(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise ConfigError(
            f"--autoscale gain:{text}: give the share of one rank's speed below which a rank is not worth having, more "
            f"than 0 and at most 1, such as gain:0.7."
        )
    return share


def _schedule_of(value: str) -> Schedule:
    """Of a file, or of the entries themselves, separated by semicolons: so it is passed on to a launcher elsewhere."""
    path, are_entries = Path(value), any(form.match(value) for form in (_ENTRY, _ZONE))
    try:
        text = value.replace(";", "\n") if are_entries else read_config_text(path)
    except OSError as error:
        raise ConfigError(
            f"--autoscale schedule:{value}: the file cannot be read ({error.strerror}). Give one with lines such as "
            f"`mon-fri 08:00 16`."
        ) from error
    minutes: dict[int, int] = {}
    places: dict[int, str] = {}
    zone = "UTC"
    for number, line in enumerate(text.splitlines(), start=1):
        if not (words := line.partition("#")[0].strip()):
            continue
        place = f"--autoscale schedule: {words!r}" if are_entries else f"{value}, line {number}: {words!r}"
        if named := _ZONE.fullmatch(words):
            zone = _known_zone(named[1], place)
            continue
        added, before = _entries_of(words, place), set(places.values())
        minutes.update(added)
        places.update(dict.fromkeys(added, place))
        if hidden := before - set(places.values()):
            raise ConfigError(
                f"{hidden.pop()} has no effect: {place} has other numbers for all of its times. Remove one of them, or "
                f"write the one for fewer days behind the other."
            )
    if not minutes:
        raise ConfigError(f"--autoscale schedule:{value} has no times. Write lines such as `mon-fri 08:00 16`.")
    return Schedule(tuple(sorted(minutes.items())), zone)


def _known_zone(name: str, place: str) -> str:
    try:
        return ZoneInfo(name).key
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ConfigError(
            f"{place}: there is no such time zone here. Write its name in the IANA database, such as `timezone "
            f"Europe/Berlin`; where a system has none, install tzdata."
        ) from error


def _entries_of(line: str, place: str) -> dict[int, int]:
    found = _ENTRY.fullmatch(line.lower())
    days = [_DAYS.index(day) if day in _DAYS else None for day in found.groups()[:2] if day] if found else [None]
    if found is None or None in days or int(found[3]) > 23 or int(found[4]) > 59:
        raise ConfigError(
            f"{place} is not understood. Write days, time and ranks, such as `mon-fri 08:00 16`. Times "
            f"are in UTC, or in that of a line such as `timezone Europe/Berlin`."
        )
    if int(found[5]) < 1:
        raise ConfigError(f"{place}: a job needs at least one rank.")
    first, last = (days[0], days[-1]) if days else (0, 6)
    assert first is not None
    assert last is not None
    minute = int(found[3]) * 60 + int(found[4])
    return {(first + day) % 7 * 1440 + minute: int(found[5]) for day in range((last - first) % 7 + 1)}


def _time_in_words(minute: int) -> str:
    return f"{_DAYS[minute // 1440]} {minute // 60 % 24:02}:{minute % 60:02}"


def first_size(policy: Policy, sizes: Sizes, num_slots: int, utc: datetime) -> int:
    """With how many ranks a job begins that has `num_slots` at once: all, with `gain` as few as it may have, with a
    schedule as many as that has at the time."""
    match policy:
        case Fill():
            return sizes.nearest(num_slots)
        case Gain():
            return sizes.first
        case Schedule():
            return sizes.nearest(min(policy.entry_at(utc)[1], num_slots))


def describe_policy(policy: Policy, sizes: Sizes, first: int, where: str) -> str:
    """What a dry run prints. `where` is where more slots come from."""
    return (
        f"autoscale {policy}: {policy.in_words()}\n  {sizes.in_words()}; it begins with {first}; more come from {where}"
    )


# -- sizes and speeds -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """The numbers of ranks that a job may have: multiples of `unit` from `least` to `most`."""

    least: int
    most: int
    unit: int = 1

    @classmethod
    def of(cls, least: int, most: int, slots_per_host: int, group_size: int = 1) -> Sizes:
        """Whole hosts, and whole replica groups."""
        return cls(least, most, math.lcm(slots_per_host, group_size))

    @property
    def first(self) -> int:
        return round_up(self.least, self.unit)

    @property
    def last(self) -> int:
        return self.most // self.unit * self.unit

    @property
    def are_none(self) -> bool:
        return self.first > self.last

    def check(self) -> None:
        """Raises `ConfigError` if there are none."""
        if self.are_none:
            raise ConfigError(
                f"--autoscale: --elastic {self.least}:{self.most} has no multiple of {self.unit}, the slots of a host, "
                f"and hosts come and go as a whole. Give other limits, or another --nproc."
            )

    def in_words(self) -> str:
        steps = f" in steps of {self.unit}" if self.unit > 1 else ""
        return f"{self.first} to {self.last} ranks{steps}"

    def nearest(self, size: int) -> int:
        """The greatest that is not above `size`, or the least of all."""
        return max(self.first, min(size, self.last) // self.unit * self.unit)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.last + 1, self.unit))


@dataclass(frozen=True)
class Rate:
    """What `size` ranks do, as measured until the time `at`; `error` is the standard error, relative."""

    size: int
    steps_per_second: float
    error: float
    at: float

    @property
    def least(self) -> float:
        return self.steps_per_second * (1 - 2 * self.error)

    @property
    def most(self) -> float:
        return self.steps_per_second * (1 + 2 * self.error)


@dataclass(frozen=True)
class Seen:
    """What there is at a time: `now` in seconds of any clock, and the same moment in UTC."""

    now: float
    utc: datetime
    size: int
    """Ranks that train."""
    rate: Rate | None = None
    """What was measured last."""
    predicted: Mapping[int, float] = field(default_factory=dict)
    """Seconds of a step, by the number of ranks, as far as they are predicted."""
    room: int | None = None
    """The most ranks for which there are slots; `None` where only the cluster knows."""


@dataclass(frozen=True)
class Patience:
    """Seconds that a decision waits."""

    settle: float = 30.0
    """After a change of size, before the next request."""
    come: float = 300.0
    """For what was asked for to come."""
    first_hold: float = 450.0
    """After ranks were taken away, before fewer are asked for than trained, and after they have come back, before more
    are."""
    longest_hold: float = 2400.0
    of_parts: float = 3600.0
    """For the rest of a request of which a part has come."""
    trial: float = 300.0
    """How long a size is new."""
    first_ban: float = 2 * 3600.0
    longest_ban: float = 24 * 3600.0

    def is_to_end(self, seconds: float, last_seconds: float) -> bool:
        """Whether what has lasted for some `seconds`, and the last time for `last_seconds`, is expected to end before a
        request pays."""
        return last_seconds - self.longest_hold < seconds < 1.5 * last_seconds


PATIENCE = Patience()


@dataclass(frozen=True)
class Ban:
    """A size that did not pay, and is not asked for again before `until`."""

    until: float
    seconds: float


@dataclass(frozen=True)
class Gap:
    """In which fewer ranks trained than were asked for: how many, how long, and how many there were soon after it."""

    size: int
    seconds: float
    until_size: int


@dataclass(frozen=True)
class State:
    """What was decided so far, and what was learnt."""

    wanted: int
    why: str = ""
    since: float = 0.0
    """When this number was asked for."""
    asked_by: int = 0
    """How many ranks trained then."""
    comes_partly: bool = False
    """Whether a part of a request has come, and not the rest."""
    refused: int = 0
    """The least size that was asked for and has not come; 0 once ranks have come late."""
    size: int = 0
    came_at: float = -math.inf
    """When the number of ranks that train changed last."""
    trained: int = 0
    """The ranks that trained before some were taken away which have not come back."""
    dropped_at: float = -math.inf
    stayed_until_dropped: float = 0.0
    """For how long these had trained, if more were asked for until then; else 0."""
    most: int = 0
    """The greatest number of ranks that has ever trained."""
    last_grant: float = 0.0
    """For how long that many trained the last time, while more were asked for in vain; 0 if none were."""
    last_gap: Gap | None = None
    holds: Mapping[int, Ban] = field(default_factory=dict)
    """By sizes that trained when ranks were taken away: each is neither exceeded nor left for a while."""
    num_units: int = 1
    """By how many units to grow at most: see [Note: growing]."""
    before: int = 0
    """The size before the last growth."""
    windows: tuple[Rate, ...] = ()
    """What was measured last since these ranks train."""
    scatter: float = 0.0
    """The root of the mean square by which windows have differed from those before, of all sizes, relative."""
    rates: Mapping[int, Rate] = field(default_factory=dict)
    """What was measured when a size trained last, by size."""
    bans: Mapping[int, Ban] = field(default_factory=dict)

    def cap(self, now: float, patience: Patience) -> float:
        """The sizes from this one on are not asked for."""
        banned = [size for size, ban in self.bans.items() if now < ban.until]
        held = [size for size, hold in self.holds.items() if now < hold.until]
        if patience.is_to_end(now - self.came_at, self.last_grant):
            held.append(self.most)
        return min([*banned, *(size + 1 for size in held), math.inf])


def decide(policy: Policy, sizes: Sizes, state: State, seen: Seen, patience: Patience = PATIENCE) -> State:
    """The next state. Its `wanted` differs from before if another number of ranks is to be asked for; `why` is then the
    reason, in words."""
    before, state = state, _learnt(state, seen, patience)
    if isinstance(policy, Schedule):
        return _scheduled(policy, sizes, state, seen)
    if seen.size > state.wanted:
        return _taken_over(before, state, seen)
    state = _held(state, seen, patience)
    if state.wanted != before.wanted:
        return state
    return _back(policy, sizes, state, seen, patience) or _grown(policy, sizes, state, seen, patience) or state


def _learnt(state: State, seen: Seen, patience: Patience) -> State:
    if seen.size != state.size:
        if seen.size >= state.refused or (seen.size > state.size and seen.now - state.since > patience.come):
            state = replace(state, refused=0)
        holds = {size: hold for size, hold in state.holds.items() if size >= seen.size}
        if (hold := holds.get(seen.size)) is not None:  # they have come back, and have to stay for as long
            holds[seen.size] = Ban(seen.now + hold.seconds, hold.seconds)
        state = _risen(replace(state, holds=holds), seen, patience)
        if seen.size >= state.trained:
            state = replace(state, trained=0)
        stayed = seen.now - state.came_at
        has_stayed = stayed >= patience.come
        if (has_stayed or not state.trained) and seen.size < min(state.size, state.wanted):  # nobody has asked for it
            stayed = stayed if state.wanted > state.size else 0.0
            state = replace(state, trained=state.size, dropped_at=seen.now, stayed_until_dropped=stayed)
        state = replace(state, size=seen.size, came_at=seen.now, windows=())
    rate = seen.rate
    if rate is None or rate in state.windows[-1:]:
        return state
    if rate.size != seen.size or rate.at < state.came_at:  # of a former size, or a former time
        return state if rate.size in state.rates else replace(state, rates={**state.rates, rate.size: rate})
    scatter = state.scatter
    if state.windows:
        former = state.rates[rate.size].steps_per_second
        scatter = math.hypot(math.sqrt(0.8) * scatter, math.sqrt(0.2) * (rate.steps_per_second / former - 1))
    windows = (*state.windows, rate)[-_NUM_WINDOWS:]
    rates = {**state.rates, rate.size: _pooled(windows, scatter)}
    return replace(state, windows=windows, scatter=scatter, rates=rates)


def _risen(state: State, seen: Seen, patience: Patience) -> State:
    """If ranks have come: what is known of the gap before, which may still be coming to its end."""
    if not 0 < state.size < seen.size:
        return state
    gap, stayed = state.last_gap, seen.now - state.came_at
    if gap is not None and gap.until_size == state.size and stayed < patience.come:
        gap = replace(gap, until_size=seen.size)
    else:
        gap = Gap(state.size, stayed, seen.size)
    if seen.size > state.most:
        state = replace(state, last_grant=0.0)
    return replace(state, last_gap=gap, most=max(state.most, seen.size))


def _pooled(windows: Sequence[Rate], scatter: float) -> Rate:
    """One rate of several of one size: their mean, weighted by their errors. Its error is at least as great as theirs
    together, and as what windows scatter by: each knows only how the steps in it do."""
    weights = [max(one.error, _LEAST_ERROR) ** -2 for one in windows]
    mean = sum(one.steps_per_second * weight for one, weight in zip(windows, weights, strict=True)) / sum(weights)
    if len(windows) > 1:
        scatter = max(scatter, statistics.stdev(one.steps_per_second for one in windows) / mean)
    error = max(sum(weights) ** -0.5, scatter / math.sqrt(len(windows)))
    return Rate(windows[-1].size, mean, error, windows[-1].at)


def _taken_over(before: State, state: State, seen: Seen) -> State:
    """More ranks train than were asked for: some are about to leave, or somebody else has asked for them."""
    if seen.size <= before.size:
        return state
    return _asked(state, seen.size, f"{seen.size} ranks train, more than the {state.wanted} that were asked for", seen)


def _asked(state: State, wanted: int, why: str, seen: Seen, **more: int) -> State:
    return replace(state, wanted=wanted, why=why, since=seen.now, asked_by=seen.size, **more)  # type: ignore[arg-type]


def _scheduled(policy: Schedule, sizes: Sizes, state: State, seen: Seen) -> State:
    minute, size = policy.entry_at(seen.utc)
    wanted = sizes.nearest(size)
    if wanted == state.wanted:
        return state
    limits = "" if wanted == size else f"; of the possible sizes {wanted} is the nearest"
    return _asked(state, wanted, f"the schedule has {size} from {_time_in_words(minute)}{limits}", seen)


def _held(state: State, seen: Seen, patience: Patience) -> State:
    """Where ranks were taken away, and others have not come at once, as for one that was killed: see [Note:
    hysteresis]."""
    former = state.holds.get(state.trained)
    is_known = former is not None and former.until - former.seconds >= state.dropped_at
    if not state.trained or is_known or seen.now - state.dropped_at < patience.settle:
        return state
    seconds = patience.first_hold
    if former is not None and seen.now - former.until < 7 * former.seconds:
        seconds = min(2 * former.seconds, patience.longest_hold)
    state = replace(state, holds={**state.holds, state.trained: Ban(seen.now + seconds, seconds)})
    if state.trained == state.most and state.stayed_until_dropped:
        state = replace(state, last_grant=state.stayed_until_dropped)
    if state.wanted <= state.trained or state.comes_partly:
        return state
    why = (
        f"only {seen.size} of {state.trained} ranks are left; for {_duration(seconds)} no more than these are asked for"
    )
    return _asked(state, state.trained, why, seen)


# -- back to fewer ranks ----------------------------------------------------------------------------------


def _back(policy: Fill | Gain, sizes: Sizes, state: State, seen: Seen, patience: Patience) -> State | None:
    """Fewer ranks, if what was measured since these ones train says that the last of them are not worth having."""
    rate = state.rates.get(seen.size)
    if rate is None or rate.at < state.came_at or seen.size <= sizes.first:
        return None
    former = state.rates.get(state.before)
    enough = 1 if seen.now - state.came_at <= patience.trial else 1 - _TOLERANCE  # see [Note: hysteresis]
    if former is not None and state.before < seen.size and rate.most < enough * former.least:
        why = f"{_speed(rate)} with {rate.size} ranks is less than {_speed(former)} with {former.size}"
        return _banned(state, seen, patience, sizes.nearest(state.before), why)
    if isinstance(policy, Gain):
        share, error = _share(state, seen, rate)
        if share * (1 + 2 * error) < enough * policy.share:
            why = f"each of {rate.size} ranks is only {share:.0%} as fast as one alone ({_speed(rate)})"
            return _banned(state, seen, patience, _smaller(policy, sizes, state, seen), why)
    return None


def _banned(state: State, seen: Seen, patience: Patience, wanted: int, why: str) -> State:
    known = state.bans.get(seen.size)
    seconds = patience.first_ban if known is None else min(4 * known.seconds, patience.longest_ban)
    ban = Ban(seen.now + seconds, seconds)
    state = replace(state, bans={**state.bans, seen.size: ban})
    return _asked(state, wanted, f"{why}; not tried again for {_duration(seconds)}", seen, num_units=1, before=0)


def _smaller(policy: Gain, sizes: Sizes, state: State, seen: Seen) -> int:
    """The greatest size below the present one that may be worth having."""
    for size in reversed([size for size in sizes if size < seen.size]):
        expected = _expected(state, seen, size)
        if expected is None or expected.steps_per_second / size >= policy.share * _of_one_rank(state, seen):
            return size
    return sizes.first


# -- more ranks -------------------------------------------------------------------------------------------


def _grown(policy: Fill | Gain, sizes: Sizes, state: State, seen: Seen, patience: Patience) -> State | None:
    """More ranks, once all that were asked for train; or fewer than asked for, if they do not come."""
    if seen.size < state.wanted:
        return _given_up(sizes, state, seen, patience)
    is_measured = len(state.windows) > 1  # of one, nobody knows what it would have been at another time
    waits = patience.settle if is_measured else patience.come  # a loop without an engine measures nothing
    if seen.now - state.came_at < waits or (isinstance(policy, Gain) and not is_measured):
        return None
    num_units = 2 * state.num_units if state.before and state.before < seen.size not in state.holds else 1
    reach = min(seen.size + num_units * sizes.unit, sizes.last, math.inf if seen.room is None else seen.room)
    if state.refused > seen.size:
        reach = min(reach, max(state.refused - sizes.unit, seen.size + sizes.unit))
    elif held := [size for size in state.holds if size > reach]:
        reach = min(*held, sizes.last, math.inf if seen.room is None else seen.room)
    larger = [size for size in sizes if seen.size < size <= reach and size < state.cap(seen.now, patience)]
    if isinstance(policy, Gain):
        larger = _worth_having(policy, state, seen, larger, sizes.unit)
    if not larger:
        return None
    return _asked(
        state, larger[-1], _why_more(policy, state, seen, larger[-1]), seen, num_units=num_units, before=seen.size
    )


def _given_up(sizes: Sizes, state: State, seen: Seen, patience: Patience) -> State | None:
    waited = seen.now - max(state.since, state.came_at)
    if waited < patience.come:
        return None
    if not state.trained and seen.size > state.asked_by:
        state = replace(state, comes_partly=True)
    missing = (state.wanted - sizes.nearest(seen.size)) // sizes.unit
    hold = state.holds.get(state.trained)
    waits = patience.come if hold is None else hold.seconds
    waits = patience.of_parts if state.comes_partly else waits
    if missing <= 1 or waited < waits or _is_gap_to_end(state, seen, patience):
        return state
    wanted = sizes.nearest(seen.size) + sizes.unit
    why = f"only {seen.size} of {state.wanted} ranks came within {_duration(waits)}, so fewer are asked for"
    if not state.trained:
        hold = Ban(seen.now, min(2 * patience.first_hold, patience.longest_hold))  # of the next time, twice as long
        state = replace(state, refused=state.wanted, holds={**state.holds, seen.size: hold})
    return _asked(state, wanted, why, seen, num_units=1, trained=0)


def _is_gap_to_end(state: State, seen: Seen, patience: Patience) -> bool:
    """Whether all ranks that trained before are expected to come back at once, and soon. See [Note: hysteresis]."""
    last = state.last_gap
    if last is None or last.size != seen.size or not 0 < state.trained <= last.until_size:
        return False
    return patience.is_to_end(seen.now - state.came_at, last.seconds)


def _worth_having(policy: Gain, state: State, seen: Seen, larger: list[int], unit: int) -> list[int]:
    """Of `larger` sizes those where each rank is expected to do its share; the next one also where that is a guess."""
    least = policy.share * _of_one_rank(state, seen)
    share, error = _share(state, seen, state.rates[seen.size])
    if share * (1 - error) < policy.share:
        return []
    found = []
    for size in larger:
        expected = _expected(state, seen, size)
        is_known = expected is not None and not expected.is_guess
        surely = 0.0 if expected is None else expected.steps_per_second * (1 - max(error, expected.error)) / size
        if surely >= least or (size == seen.size + unit and not is_known):
            found.append(size)
    return found


def _why_more(policy: Fill | Gain, state: State, seen: Seen, wanted: int) -> str:
    rate = state.rates.get(seen.size)
    now = f"{seen.size} rank{' trains' if seen.size == 1 else 's train'}" + (
        f" at {_speed(rate)}" if rate is not None else ""
    )
    if isinstance(policy, Fill):
        return f"{now}, and there may be room for more"
    expected = _expected(state, seen, wanted)
    if expected is None:
        return f"{now}, and each does {_share(state, seen, state.rates[seen.size])[0]:.0%} of what one would alone"
    share = expected.steps_per_second / wanted / _of_one_rank(state, seen)
    return f"{now}; with {wanted} each is expected to do {share:.0%} of what one would alone"


# -- what is known of speeds ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """What is expected of a size; `error` is that of a guess, relative."""

    steps_per_second: float
    error: float = 0.0
    is_guess: bool = False


def _expected(state: State, seen: Seen, size: int) -> Expected | None:
    """What `size` ranks do: measured, predicted from what is measured now, or guessed; `None` if nothing of it is
    possible. Of a prediction only ratios are used, so that its errors which are the same at all sizes cancel."""
    measured, now = state.rates.get(size), state.rates.get(seen.size)
    if measured is not None and size not in state.bans:
        return Expected(measured.steps_per_second)
    if now is None:
        return None
    present, other = _predicted(seen, seen.size), _predicted(seen, size)
    if present is None or other is None:
        return _guessed(state, now, size)
    return Expected(now.steps_per_second * present / other)


def _guessed(state: State, now: Rate, size: int) -> Expected | None:
    """Of up to twice as many ranks as at present, by what half as many or fewer do: seconds of a step are a + b / ranks
    (Amdahl's law). No guess is better than that each rank does as much as one does at present."""
    halves = [one for one in state.rates if 2 * one <= now.size and one not in state.bans]
    if not halves or not now.size < size <= 2 * now.size:
        return None
    half = state.rates[max(halves)]
    before, present = 1 / half.steps_per_second, 1 / now.steps_per_second
    weight = (1 / now.size - 1 / size) / (1 / half.size - 1 / now.size)
    seconds = max(present - weight * (before - present), present * now.size / size)
    error = math.hypot((1 + weight) * present * now.error, weight * before * half.error) / seconds
    return Expected(1 / seconds, error, is_guess=True)


def _of_one_rank(state: State, seen: Seen) -> float:
    """Steps per second of one rank alone: measured, or predicted from the smallest size that was. Instead of one it is
    each of a replica group, if there are such, and without a prediction each of that smallest size."""
    least = state.rates[min(state.rates)]
    alone = min(seen.predicted, default=least.size)
    together = _predicted(seen, least.size)
    if together is None:
        return least.steps_per_second / least.size
    return least.steps_per_second * together / seen.predicted[alone] / alone


def _predicted(seen: Seen, size: int) -> float | None:
    """Seconds of a step of `size` ranks; between two sizes that are predicted, on the power law through them."""
    known = seen.predicted
    below = max((one for one in known if one <= size), default=None)
    above = min((one for one in known if one >= size), default=None)
    if below is None or above is None:
        return None
    if below == above:
        return known[size]
    part = math.log(size / below) / math.log(above / below)
    return known[below] * math.pow(known[above] / known[below], part)


def _share(state: State, seen: Seen, rate: Rate) -> tuple[float, float]:
    """What each rank does of what one would alone, and the standard error of that, relative."""
    least = state.rates[min(state.rates)]
    error = math.hypot(rate.error, least.error) if least is not rate else 0.0
    return rate.steps_per_second / rate.size / _of_one_rank(state, seen), error


def _speed(rate: Rate) -> str:
    return f"{rate.steps_per_second:.3g} steps/s"


def _duration(seconds: float) -> str:
    if seconds >= 7200:
        return f"{seconds / 3600:g} hours"
    return f"{seconds / 60:g} minutes" if seconds >= 60 else f"{seconds:g} s"
