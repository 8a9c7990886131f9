"""Classifies the cause of lost ranks, and decides what to do about it, only by how they ended.

[Note: what a failure follows] A single exception may be caused by the code, the data or the machine. The pattern tells
them apart. On all ranks at the same step: the code, which is the same everywhere. The same error at the same step after
the samples went to other ranks: the data. The same host repeatedly, with any errors: the host. So the first failure of
a single rank is attributed to its node, which costs nothing: the step is repeated, and its result decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from shardwise.elastic.failure_signatures import End, Sign, sign_of
from shardwise.errors import some

Kind = Literal["code", "data", "node", "network"]
Action = Literal["stop", "skip", "shrink", "exclude", "retry"]
"""stop: the job ends and is not restarted. skip: the batch is skipped. shrink: the others continue, and a replacement
may be started. exclude: nothing is started on that host for a time. retry: the same ranks repeat the step."""

_MAX_RANKS_NAMED = 8
_NODE_FAULTS: dict[Sign, str] = {
    "memory": "ran out of memory",
    "gpu": "has a device that fails",
    "disk": "has a disk that is full or fails",
    "bits": "has memory or a processor that changes bits",
}


@dataclass(frozen=True)
class Policy:
    """What the user chose to do about faults.

    `data`: about a batch that fails on whichever rank gets it. A host is excluded after `host_faults` faults of its own
    within `seconds`. After `link_faults` faults of one connection in that time, the host at one end is excluded, or the
    job is stopped. The job is stopped after more than `faults` faults of any kind within `seconds`, if given.
    """

    data: Literal["stop", "skip"] = "stop"
    host_faults: int = 3
    link_faults: int = 3
    faults: int | None = None
    seconds: float = 600.0


@dataclass(frozen=True)
class Disconnection:
    """Living members whose messages did not reach each other; `ranks` and `hosts` are theirs, in the same order. `why`
    is a sentence that names them."""

    members: tuple[int, ...]
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    why: str
    step: int = -1

    @property
    def link(self) -> frozenset[object]:
        """The same for all faults of one connection: hosts if it is between hosts, else members."""
        return frozenset(self.hosts if len(set(self.hosts)) > 1 else self.members)


@dataclass(frozen=True)
class Cause:
    """The cause of a fault, the evidence for it as a sentence, and the action."""

    kind: Kind
    action: Action
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    evidence: str
    step: int = -1

    def __str__(self) -> str:
        return f"{self.kind}: {self.evidence} {_CONSEQUENCES[self.action]}"

    def record(self) -> dict[str, object]:
        """For the run record; JSON."""
        return {
            "cause": self.kind,
            "action": self.action,
            "ranks": list(self.ranks),
            "hosts": list(self.hosts),
            "evidence": self.evidence,
            "at_step": self.step,
        }


_CONSEQUENCES: dict[Action, str] = {
    "stop": "The job is stopped, because a restart would not help.",
    "skip": "The batch is skipped.",
    "shrink": "The others continue.",
    "exclude": "The host is excluded.",
    "retry": "The step is repeated.",
}


@dataclass
class Classifier:
    """Classifies each fault of a job, given those before."""

    policy: Policy = field(default_factory=Policy)
    _before: list[tuple[float, End]] = field(default_factory=list)
    _cuts: list[tuple[float, Disconnection]] = field(default_factory=list)

    def classify(self, ends: Sequence[End], num_ranks: int, now: float) -> Cause:
        """The cause of `ends`, the ranks just lost (at least one) of `num_ranks`. `now` is in seconds, of any
        monotonic clock."""
        self._forget(now)
        causes = _root_causes(ends)
        cause = self._classified(causes, num_ranks)
        self._before += [(now, end) for end in causes if sign_of(end) != "asked"]
        return self._within_limits(cause)

    def classify_disconnection(
        self, cut: Disconnection, now: float, can_spare: Callable[[str], bool] = lambda _: False
    ) -> Cause:
        """The cause of a fault in which nobody was lost. `can_spare` tells whether the job can do without a host."""
        self._forget(now)
        self._cuts.append((now, cut))
        faults = sum(one.link == cut.link for _, one in self._cuts)
        hosts = tuple(dict.fromkeys(filter(None, cut.hosts)))
        action: Action = "retry"
        text = cut.why
        if faults >= self.policy.link_faults:
            text += f" That is fault {faults} of this connection within {self.policy.seconds:g} s."
            excluded = self._worst_host(cut)
            spares = len(set(cut.hosts)) > 1 and can_spare(excluded)
            action, hosts = ("exclude", (excluded,)) if spares else ("stop", hosts)
        return self._within_limits(Cause("network", action, cut.ranks, hosts, text, cut.step))

    def _worst_host(self, cut: Disconnection) -> str:
        """The one of its hosts with most faults of connections; of equal ones the last."""
        counts = Counter(host for _, one in self._cuts for host in set(one.hosts))
        return max(reversed(cut.hosts), key=lambda host: counts[host])

    def _forget(self, now: float) -> None:
        """Forget faults that are too long ago to count."""
        self._before = [(at, end) for at, end in self._before if at > now - self.policy.seconds]
        self._cuts = [(at, cut) for at, cut in self._cuts if at > now - self.policy.seconds]

    def _within_limits(self, cause: Cause) -> Cause:
        """`cause`, or the end of the job after too many faults of any kind."""
        num_faults, most = len(self._before) + len(self._cuts), self.policy.faults
        if cause.action in ("stop", "skip") or most is None or num_faults <= most:
            return cause
        many = f"{cause.evidence} It is fault {num_faults} within {self.policy.seconds:g} s; {most} are allowed."
        return Cause(cause.kind, "stop", cause.ranks, cause.hosts, many, cause.step)

    def _classified(self, ends: Sequence[End], num_ranks: int) -> Cause:
        signs = {sign_of(end) for end in ends}
        if signs <= {"asked"}:
            return _cause(
                "node", "shrink", ends, f"{_ranks(ends)} {_were(ends)} asked to end, by {ends[0].signal_name}."
            )
        if signs == {"left"}:  # a rank that was lost before, whose cause is known
            return _cause("node", "shrink", ends, f"{_did(ends)}.")
        if signs <= {"connection", "fault"}:
            return self._network(ends)
        if signs == {"bits"} and len(ends) > 1:  # all say of which rank, or that it is one of two
            return _cause("node", "shrink", ends, f"{ends[0].manner}, and so did all of {_ranks(ends)}.")
        if signs == {"data"}:
            return self._data(ends, f"{_did(ends)}.")
        if len(ends) > 1 and _are_alike(ends, num_ranks) and not all(end.is_new for end in ends):
            common = f"{ends[0].manner} on {'all' if num_ranks == len(ends) else len(ends)} ranks, at one step."
            if signs & {"exception", "exit", "crash", "memory"}:
                return _cause("code", "stop", ends, f"The same happened everywhere: it {common}")
        return self._single(ends, num_ranks)

    def _single(self, ends: Sequence[End], num_ranks: int) -> Cause:
        """The cause of failures of some ranks only, or of different kinds."""
        own = [end for end in ends if sign_of(end) in _NODE_FAULTS]
        if own:
            what = _NODE_FAULTS[sign_of(own[0])]
            where = f"{own[0].host} " if own[0].host else f"The machine of rank {own[0].rank} "
            return self._node(own, f"{where}{what}: rank {own[0].rank} {own[0].manner}.")
        if sign_of(ends[0]) in ("exception", "crash", "exit") and (cause := self._repeated(ends)) is not None:
            return cause
        host = ends[0].host
        gone = "" if len(ends) == 1 else f", {len(ends)} of {num_ranks} ranks at once"
        where = f" (all on {host})" if host and len(ends) > 1 and len({end.host for end in ends}) == 1 else ""
        return self._node(ends, f"{_did(ends)}{gone}{where}.")

    def _repeated(self, ends: Sequence[End]) -> Cause | None:
        """The cause of a failure with the same error as earlier ones, if that shows it; else `None`. What ends those
        that have only joined need not end the others, who were there without them."""
        first = ends[0]
        known = [end for _, end in self._before if not (end.is_new or first.is_new)]
        again = [end for end in known if end.signature == first.signature and sign_of(end) == sign_of(first)]
        same_step = [end for end in again if end.step == first.step]
        if same_step and all(end.rank == first.rank for end in same_step):
            text = f"{_did(ends)}, at the same step again, though in another process and with other samples."
            return _cause("code", "stop", ends, text)
        if same_step:
            text = f"{_did(ends)}, as rank {same_step[-1].rank} had at the same step with the same samples."
            return self._data(ends, text)
        elsewhere = {(end.host, end.rank) for end in again} - {(first.host, first.rank)}
        if len(again) >= 2 and elsewhere:
            steps = ", ".join(str(end.step) for end in again[-3:])
            return _cause("code", "stop", ends, f"{_did(ends)}, as other ranks had after steps {steps}.")
        return None

    def _node(self, ends: Sequence[End], text: str) -> Cause:
        host = ends[0].host
        if host and sign_of(ends[0]) == "bits":  # it looks healthy, and nobody would know how often it happens
            return _cause("node", "exclude", ends, text)
        faults = len({at for at, end in self._before if end.host == host and sign_of(end) != "asked"}) + 1
        if host and faults >= self.policy.host_faults:
            return _cause("node", "exclude", ends, f"{text} That is fault {faults} of {host} in a short time.")
        return _cause("node", "shrink", ends, text)

    def _network(self, ends: Sequence[End]) -> Cause:
        unreached = [end for end in ends if end.is_alive] or list(ends)
        host = unreached[0].host
        known = [(at, end) for at, end in self._before if end.host == host]
        faults = len({at for at, end in known if sign_of(end) in ("connection", "fault")}) + 1
        first = unreached[0]
        if first.is_alive:
            text = f"{_ranks(unreached)} could not be reached: {first.text or first.error or 'nothing was heard'}."
        else:
            text = f"{_did(unreached)}, and no rank had died before."
        if host and faults >= self.policy.host_faults:
            return _cause("network", "exclude", unreached, f"{text} That is fault {faults} of {host} in a short time.")
        return _cause("network", "retry", unreached, text)

    def _data(self, ends: Sequence[End], text: str) -> Cause:
        named = next((end.batch for end in ends if end.batch), "")
        evidence = f"{text} {named[:1].upper()}{named[1:]}." if named else text
        return _cause("data", self.policy.data, ends, evidence)


def _root_causes(ends: Sequence[End]) -> list[End]:
    """The ranks that failed by themselves; the others only report a lost rank or connection."""
    ordered = sorted(ends, key=lambda end: (end.at, end.rank))
    primary = [end for end in ordered if sign_of(end) not in ("fault", "left", "connection", "asked")]
    asked = [end for end in ordered if sign_of(end) == "asked"]
    broken = [end for end in ordered if sign_of(end) == "connection"]
    left = [end for end in ordered if sign_of(end) == "left"]
    return primary or asked or broken or left or ordered


def _are_alike(ends: Sequence[End], num_ranks: int) -> bool:
    """Whether most ranks failed at one step with the same error, so that one rank's data cannot be the cause."""
    (_, count), *_ = Counter((end.signature, end.step) for end in ends).most_common(1)
    return count > num_ranks // 2 and count == len(ends)


def _cause(kind: Kind, action: Action, ends: Sequence[End], evidence: str) -> Cause:
    hosts = tuple(dict.fromkeys(end.host for end in ends if end.host))
    return Cause(kind, action, tuple(end.rank for end in ends), hosts, evidence, ends[0].step)


def _ranks(ends: Sequence[End]) -> str:
    numbers = some((str(end.rank) for end in ends), _MAX_RANKS_NAMED)
    return f"Rank{'s' * (len(ends) > 1)} {numbers}"


def _did(ends: Sequence[End]) -> str:
    manner = ends[0].manner
    return f"{_ranks(ends)} {manner if len(ends) == 1 else manner.replace('was ', 'were ', 1)}"


def _were(ends: Sequence[End]) -> str:
    return "was" if len(ends) == 1 else "were"
