"""Negotiation: finds the collectives that all ranks have issued, in any order, and fuses all-reduces. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod

from shardwise.integrations.horovod.messages import Request, Response
from shardwise.integrations.horovod.mismatches import call_of, describe, in_words, mismatch, why_invalid

STALL_HINT = "Check that all ranks issue the same collectives. A rank without data must call join()."
ITEM_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "int16": 2, "float16": 2, "bfloat16": 2}
ITEM_BYTES |= {"complex64": 8, "complex128": 16}
_FUSED_OPS = ("Sum", "Average", "Min", "Max", "Product")
_NOT_WITH_JOIN = ("allgather", "broadcast", "alltoall", "reducescatter")
_TENSOR_VERBS = ("allreduce", *_NOT_WITH_JOIN)
OnEvent = Callable[[str, str, int], None]
"""Called for the timeline, with a tensor name, an event (`rank`, `end` or the name of what begins), and a rank."""


@dataclass(slots=True)
class _Issued:
    """A collective that some ranks have issued, by rank."""

    since: float
    requests: dict[int, Request] = field(default_factory=dict)
    warn_after: float = 0.0

    @property
    def first(self) -> Request:
        return next(iter(self.requests.values()))


class Negotiation:
    """The collectives that some ranks have issued. `issue`, `leave` and `check_stalls` add responses to `ready`; `take`
    removes them."""

    def __init__(self, size: int, sets: Mapping[int, tuple[int, ...]], on_event: OnEvent = lambda *_: None) -> None:
        """`sets` are the initial process sets, by number; 0 has all ranks."""
        self.size = size
        self.sets = dict(sets)
        self.ready: deque[Response] = deque()
        self.outstanding: list[int] = []
        """For each response that is being executed, the rank that acknowledges it."""
        self._on_event = on_event
        self._table: dict[tuple[int, str], _Issued] = {}
        self._stalled: dict[tuple[int, str], tuple[str, set[int]]] = {}
        """Collectives that failed by a stall: the error, and the ranks that get it when they issue them later."""
        self._joined: list[int] = []
        self._left: dict[int, str] = {}
        """Why ranks have left."""
        self._next_set = max(self.sets) + 1

    # -- messages of ranks ------------------------------------------------------------------------------

    def issue(self, rank: int, request: Request, now: float) -> None:
        if request.verb == "join":
            self._join(rank)
            return
        stalled = self._stalled.get(request.key)
        if stalled is not None and rank in stalled[1]:
            stalled[1].discard(rank)
            if not stalled[1]:
                del self._stalled[request.key]
            self._respond(Response(request.verb, (request.name,), request.process_set, stalled[0], (rank,)))
            return
        issued = self._table.get(request.key)
        if issued is None:
            issued = self._table[request.key] = _Issued(now)
            self._on_event(request.name, f"NEGOTIATE_{request.verb.upper()}", rank)
        issued.requests[rank] = request
        self._on_event(request.name, "rank", rank)
        self._update(request.key)

    def leave(self, rank: int, why: str) -> None:
        """A rank has left. Collectives that need it fail, including complete ones that have not been sent."""
        self._left.setdefault(rank, why)
        self.outstanding = [other for other in self.outstanding if other != rank]
        self.ready = deque(self._failed_without(rank, why, response) for response in self.ready)
        for key in list(self._table):
            if key in self._table:
                self._table[key].requests.pop(rank, None)
                if not self._table[key].requests:
                    del self._table[key]
                else:
                    self._update(key)
        if self._joined:
            error = f"Rank {rank} {why}, so join() cannot end on the others."
            self._respond(Response("join", ("join",), error=error, to=tuple(self._joined)))
            self._joined = []

    def _failed_without(self, rank: int, why: str, response: Response) -> Response:
        """An error in place of `response` if it needs `rank`, which has left; else `response`."""
        members = self._ranks_of(response.process_set)
        if response.error or response.verb not in _TENSOR_VERBS or rank not in members:
            return response
        error = f"{describe(response.verb, response.names[0])} was issued by all ranks, but then rank {rank} {why}."
        others = tuple(other for other in members if other != rank)
        return Response(response.verb, response.names, response.process_set, error, others)

    def acknowledge(self, rank: int) -> None:
        if rank in self.outstanding:
            self.outstanding.remove(rank)

    def check_stalls(self, now: float, warn_seconds: float, error_seconds: float) -> list[str]:
        """Fail collectives that are not issued by all ranks within `error_seconds`; returns warnings about others."""
        warnings = []
        for key, issued in list(self._table.items()):
            seconds = now - issued.since
            missing = self._missing(key[0], issued)
            found = (
                f"{call_of(issued.first)} was issued by {in_words(issued.requests)}, but for {seconds:.0f} s not by "
                f"{in_words(missing)}"
            )
            if error_seconds and seconds > error_seconds:
                error = f"{found}. {STALL_HINT}"
                self._stalled[key] = error, set(missing)
                self._fail(key, error)
            elif warn_seconds and seconds > max(warn_seconds, issued.warn_after):
                issued.warn_after = 2 * seconds
                warnings.append(found)
        return warnings

    # -- sending ----------------------------------------------------------------------------------------

    def members(self, response: Response) -> tuple[int, ...]:
        """The ranks to which `response` is sent."""
        if response.error:
            members = response.to
        elif response.verb in ("join", "add_set", "remove_set"):
            members = tuple(range(self.size))
        else:
            members = self.sets.get(response.process_set, tuple(range(self.size)))
        return tuple(rank for rank in members if rank not in self._left)

    def take(self, fusion_bytes: int) -> Response:
        """The next response, fused with others of up to `fusion_bytes` in all."""
        first = self.ready.popleft()
        if not fusion_bytes or not _can_fuse(first):
            return self._started(first)
        fused, num_bytes, rest, key = [first], _bytes_of(first), deque[Response](), _fusion_key(first)
        for other in self.ready:
            more = _bytes_of(other)
            if num_bytes + more <= fusion_bytes and _can_fuse(other) and _fusion_key(other) == key:
                fused.append(other)
                num_bytes += more
            else:
                rest.append(other)
        self.ready = rest
        if len(fused) == 1:
            return self._started(first)
        response = replace(
            first,
            names=tuple(name for one in fused for name in one.names),
            dtypes=tuple(dtype for one in fused for dtype in one.dtypes),
            shapes=tuple(shape for one in fused for shape in one.shapes),
            counts=tuple(count for one in fused for count in one.counts),
        )
        return self._started(response)

    def _started(self, response: Response) -> Response:
        """`response` as it is sent: with the rank that acknowledges it."""
        members = self.members(response)
        if not response.error and members:
            response = replace(response, acknowledges=members[0])
            self.outstanding.append(members[0])
        return response

    # -- matching ---------------------------------------------------------------------------------------

    def _update(self, key: tuple[int, str]) -> None:
        """Respond to a collective if all ranks have issued it, or if it fails."""
        issued = self._table[key]
        first = issued.first
        error = self._why_impossible(key[0], issued)
        if not error and not self._missing(key[0], issued):
            ranks = self._ranks_of(key[0])
            error = mismatch(issued.requests)
            if not error and (reason := why_invalid(issued.requests, ranks)):
                self._fail(key, reason, is_invalid=True)
                return
            if not error:
                del self._table[key]
                self._respond(self._response(first, issued.requests))
                return
        if error:
            self._fail(key, error)

    def _why_impossible(self, process_set: int, issued: _Issued) -> str:
        """An error text if the collective can never complete; else `""`."""
        first = issued.first
        if process_set not in self.sets:
            return f"{call_of(first)} uses process set {process_set}, which does not exist (any more)."
        left = [rank for rank in self._ranks_of(process_set) if rank in self._left and rank not in issued.requests]
        if left:
            return (
                f"{call_of(first)} was issued by {in_words(issued.requests)}, but rank {left[0]} {self._left[left[0]]}."
            )
        members = self._ranks_of(process_set)
        without_data = [rank for rank in self._joined if rank in members and rank not in issued.requests]
        if without_data and (first.verb in _NOT_WITH_JOIN or first.op == "Adasum"):
            what = "Adasum" if first.op == "Adasum" else first.verb
            return (
                f"{call_of(first)} was issued while {in_words(without_data)} had joined, but {what} needs data from "
                f"every rank. During join(), use only allreduce and barrier."
            )
        return ""

    def _ranks_of(self, process_set: int) -> tuple[int, ...]:
        return self.sets.get(process_set, tuple(range(self.size)))

    def _missing(self, process_set: int, issued: _Issued) -> list[int]:
        changes_sets = issued.first.verb in ("add_set", "remove_set")
        required = range(self.size) if changes_sets else self._ranks_of(process_set)
        return [rank for rank in required if rank not in issued.requests and rank not in self._joined]

    # -- join -------------------------------------------------------------------------------------------

    def _join(self, rank: int) -> None:
        if self._left:
            left, why = next(iter(self._left.items()))
            self._respond(Response("join", ("join",), error=f"Rank {left} {why}, so join() cannot end.", to=(rank,)))
            return
        self._joined.append(rank)
        for key in list(self._table):
            if key in self._table:
                self._update(key)
        if len(self._joined) == self.size:
            self._respond(Response("join", ("join",), number=self._joined[-1]))
            self._joined = []

    # -- responses that become ready --------------------------------------------------------------------

    def _fail(self, key: tuple[int, str], error: str, *, is_invalid: bool = False) -> None:
        """Raise `error` on all ranks that have issued the collective."""
        issued = self._table.pop(key)
        first = issued.first
        self._respond(
            Response(first.verb, (first.name,), key[0], error, to=tuple(issued.requests), is_invalid=is_invalid)
        )

    def _respond(self, response: Response) -> None:
        for name in response.names:
            self._on_event(name, "end", -1)
        self.ready.append(response)

    def _response(self, first: Request, requests: Mapping[int, Request]) -> Response:
        response = Response(
            first.verb,
            (first.name,),
            process_set=first.process_set,
            dtypes=first.dtypes,
            shapes=first.shapes,
            counts=(len(first.shapes),),
            op=first.op,
            prescale=first.prescale,
            postscale=first.postscale,
            root=first.root,
            device=first.device,
            joined=tuple(self._joined),
        )
        ranks = self._ranks_of(first.process_set)
        if first.verb == "allgather":
            columns = zip(*([shape[0] for shape in requests[rank].shapes] for rank in ranks), strict=True)
            return replace(response, rows=tuple(columns))
        if first.verb == "alltoall":
            return replace(response, rows=tuple(_splits(requests[rank], len(ranks)) for rank in ranks))
        if first.verb == "add_set":
            same = [number for number, known in self.sets.items() if known == first.ranks]
            number = same[0] if same else self._next_set
            self._next_set = max(self._next_set, number + 1)
            self.sets[number] = first.ranks
            return replace(response, number=number, ranks=first.ranks)
        if first.verb == "remove_set":
            self.sets.pop(first.root, None)
            for key in [key for key in self._table if key[0] == first.root]:
                self._update(key)  # fails, since its process set is gone
            return replace(response, number=first.root)
        return response


def _can_fuse(response: Response) -> bool:
    return response.verb == "allreduce" and response.op in _FUSED_OPS and not response.error


def _fusion_key(response: Response) -> tuple[object, ...]:
    """Only responses with equal keys are fused."""
    key = (response.process_set, response.op, response.prescale, response.postscale, response.device)
    return *key, response.joined, sorted(set(response.dtypes))


def _bytes_of(response: Response) -> int:
    pairs = zip(response.dtypes, response.shapes, strict=True)
    return sum(ITEM_BYTES.get(dtype, 1) * prod(shape) for dtype, shape in pairs)


def _splits(request: Request, num_ranks: int) -> tuple[int, ...]:
    return request.splits or (request.shapes[0][0] // num_ranks,) * num_ranks
