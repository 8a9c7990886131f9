"""Which collectives all ranks have issued, under whatever order, and what they contradict each other about. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod

from shardwise.integrations.horovod.letters import call_of, contradiction, in_words
from shardwise.integrations.horovod.messages import Request, Response

ITEM_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "int16": 2, "float16": 2, "bfloat16": 2}
_FUSED_OPS = ("Sum", "Average", "Min", "Max", "Product")
_WITHOUT_JOIN = ("allgather", "broadcast", "alltoall", "reducescatter")
Told = Callable[[str, str, int], None]
"""Called with a name, then `rank`, `end` or what begins, and a rank: for the timeline."""


@dataclass(slots=True)
class _Issued:
    """A collective that some ranks have issued, by rank."""

    since: float
    requests: dict[int, Request] = field(default_factory=dict)
    warn_after: float = 0.0

    @property
    def first(self) -> Request:
        return next(iter(self.requests.values()))


class Matching:
    """The table of what is under way. `issue`, `join`, `leave` and `give_up` fill `ready`, from which `take` takes."""

    def __init__(self, size: int, sets: Mapping[int, tuple[int, ...]], told: Told = lambda *_: None) -> None:
        """`sets` are the process sets that are there from the start, by number; 0 is of all ranks."""
        self.size = size
        self.sets = dict(sets)
        self.ready: deque[Response] = deque()
        self.outstanding: list[int] = []
        """The rank that acknowledges each response that was taken and is not done."""
        self._told = told
        self._table: dict[tuple[int, str], _Issued] = {}
        self._given_up: dict[tuple[int, str], tuple[str, set[int]]] = {}
        """What took too long: why, and which ranks have still to be told, when they come to it."""
        self._joined: list[int] = []
        self._gone: dict[int, str] = {}
        self._next_set = max(self.sets) + 1

    # -- what ranks say ---------------------------------------------------------------------------------

    def issue(self, rank: int, request: Request, now: float) -> None:
        if request.verb == "join":
            self._join(rank)
            return
        late = self._given_up.get(request.key)
        if late is not None and rank in late[1]:
            late[1].discard(rank)
            if not late[1]:
                del self._given_up[request.key]
            self._emit(Response(request.verb, (request.name,), request.process_set, late[0], (rank,)))
            return
        issued = self._table.get(request.key)
        if issued is None:
            issued = self._table[request.key] = _Issued(now)
            self._told(request.name, f"NEGOTIATE_{request.verb.upper()}", rank)
        issued.requests[rank] = request
        self._told(request.name, "rank", rank)
        self._look(request.key)

    def leave(self, rank: int, why: str) -> None:
        """This rank takes part in nothing any more; what others wait for from it is an error."""
        self._gone.setdefault(rank, why)
        self.outstanding = [other for other in self.outstanding if other != rank]
        for key in list(self._table):
            if key in self._table:
                self._table[key].requests.pop(rank, None)
                if not self._table[key].requests:
                    del self._table[key]
                else:
                    self._look(key)
        if self._joined:
            letter = f"Rank {rank} {why}, so join() cannot end on the others."
            self._emit(Response("join", ("join",), error=letter, to=tuple(self._joined)))
            self._joined = []

    def acknowledge(self, rank: int) -> None:
        if rank in self.outstanding:
            self.outstanding.remove(rank)

    def give_up(self, now: float, warn_seconds: float, error_seconds: float) -> list[str]:
        """What is to be reported now of tensors that some ranks keep waiting for; what takes too long is an error."""
        warnings = []
        for key, issued in list(self._table.items()):
            seconds = now - issued.since
            missing = self._missing(key[0], issued)
            said = (
                f"{call_of(issued.first)} was issued by {in_words(issued.requests)}, and for {seconds:.0f} s not by "
                f"{in_words(missing)}"
            )
            if error_seconds and seconds > error_seconds:
                cure = "Do all ranks take the same path? A rank that has no more data calls join()."
                letter = f"{said}. {cure}"
                self._given_up[key] = letter, set(missing)
                self._fail(key, letter)
            elif warn_seconds and seconds > max(warn_seconds, issued.warn_after):
                issued.warn_after = 2 * seconds
                warnings.append(said)
        return warnings

    # -- what they are told -----------------------------------------------------------------------------

    def members(self, response: Response) -> tuple[int, ...]:
        """Who is told of `response`."""
        if response.error:
            members = response.to
        elif response.verb in ("join", "add_set", "remove_set"):
            members = tuple(range(self.size))
        else:
            members = self.sets.get(response.process_set, tuple(range(self.size)))
        return tuple(rank for rank in members if rank not in self._gone)

    def take(self, fusion_bytes: int) -> Response:
        """The next response, with all others that can go with it."""
        first = self.ready.popleft()
        if not fusion_bytes or not _fuses(first):
            return self._taken(first)
        together, num_bytes, left = [first], _bytes_of(first), deque[Response]()
        for other in self.ready:
            more = _bytes_of(other)
            if num_bytes + more <= fusion_bytes and _fuses(other) and _kind(other) == _kind(first):
                together.append(other)
                num_bytes += more
            else:
                left.append(other)
        self.ready = left
        if len(together) == 1:
            return self._taken(first)
        fused = replace(
            first,
            names=tuple(name for one in together for name in one.names),
            dtypes=tuple(dtype for one in together for dtype in one.dtypes),
            shapes=tuple(shape for one in together for shape in one.shapes),
            counts=tuple(count for one in together for count in one.counts),
        )
        return self._taken(fused)

    def _taken(self, response: Response) -> Response:
        members = self.members(response)
        if not response.error and members:
            response = replace(response, acknowledges=members[0])
            self.outstanding.append(members[0])
        return response

    # -- what is found out ------------------------------------------------------------------------------

    def _look(self, key: tuple[int, str]) -> None:
        """Whether what was issued is complete, cannot become so, or contradicts itself."""
        issued = self._table[key]
        first = issued.first
        letter = self._refusal(key[0], issued)
        if not letter and not self._missing(key[0], issued):
            letter = contradiction(issued.requests, self._ranks_of(key[0]))
            if not letter:
                del self._table[key]
                self._emit(self._response(first, issued.requests))
                return
        if letter:
            self._fail(key, letter)

    def _refusal(self, process_set: int, issued: _Issued) -> str:
        first = issued.first
        if process_set not in self.sets:
            return f"{call_of(first)} is of process set {process_set}, which is not there (any more)."
        gone = [rank for rank in self._ranks_of(process_set) if rank in self._gone and rank not in issued.requests]
        if gone:
            return (
                f"{call_of(first)} was issued by {in_words(issued.requests)}, but rank {gone[0]} {self._gone[gone[0]]}."
            )
        if self._joined and (first.verb in _WITHOUT_JOIN or first.op == "Adasum"):
            what = "Adasum" if first.op == "Adasum" else first.verb
            return (
                f"{call_of(first)} was issued while {in_words(self._joined)} had joined: to {what} a rank without data "
                f"can contribute nothing. Only allreduce and barrier go on beside join()."
            )
        return ""

    def _ranks_of(self, process_set: int) -> tuple[int, ...]:
        return self.sets.get(process_set, tuple(range(self.size)))

    def _missing(self, process_set: int, issued: _Issued) -> list[int]:
        wanted = self._ranks_of(process_set)
        is_about_sets = issued.first.verb in ("add_set", "remove_set")
        return [
            rank
            for rank in (range(self.size) if is_about_sets else wanted)
            if rank not in issued.requests and rank not in self._joined
        ]

    def _join(self, rank: int) -> None:
        if self._gone:
            gone, why = next(iter(self._gone.items()))
            self._emit(Response("join", ("join",), error=f"Rank {gone} {why}, so join() cannot end.", to=(rank,)))
            return
        self._joined.append(rank)
        for key in list(self._table):
            if key in self._table:
                self._look(key)
        if len(self._joined) == self.size:
            self._emit(Response("join", ("join",), number=self._joined[-1]))
            self._joined = []

    def _fail(self, key: tuple[int, str], letter: str) -> None:
        """For all who have issued it."""
        issued = self._table.pop(key)
        first = issued.first
        self._emit(Response(first.verb, (first.name,), key[0], letter, tuple(issued.requests)))

    def _emit(self, response: Response) -> None:
        for name in response.names:
            self._told(name, "end", -1)
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
            return replace(response, number=first.root)
        return response


def _fuses(response: Response) -> bool:
    return response.verb == "allreduce" and response.op in _FUSED_OPS and not response.error


def _kind(response: Response) -> tuple[object, ...]:
    kinds = (response.process_set, response.op, response.prescale, response.postscale, response.device)
    return *kinds, response.joined, sorted(set(response.dtypes))


def _bytes_of(response: Response) -> int:
    pairs = zip(response.dtypes, response.shapes, strict=True)
    return sum(ITEM_BYTES.get(dtype, 1) * prod(shape) for dtype, shape in pairs)


def _splits(request: Request, num_ranks: int) -> tuple[int, ...]:
    return request.splits or (request.shapes[0][0] // num_ranks,) * num_ranks
