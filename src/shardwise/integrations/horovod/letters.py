"""What is told to ranks that contradict each other about a collective, or ask for what cannot be. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from shardwise.integrations.horovod.messages import Request


def contradiction(requests: Mapping[int, Request], ranks: tuple[int, ...]) -> str:
    """In which way ranks contradict each other about one name, or ask for what cannot be; `""` if they do not."""
    first = next(iter(requests.values()))
    same = all(request is first or request == first for request in requests.values())
    if not same:
        for what, value in _ASPECTS:
            letter = _differing(first, what, {rank: value(request) for rank, request in requests.items()})
            if letter:
                return letter
        for place in range(len(first.shapes)):
            label = "shapes" if len(first.shapes) == 1 else f"shapes of tensor {place}"
            letter = _differing(first, label, {rank: _fixed(request, place) for rank, request in requests.items()})
            if letter:
                return letter
    return next(_impossible(first, requests, ranks), "")


def _differing(first: Request, what: str, values: Mapping[int, str]) -> str:
    by_value: dict[str, list[int]] = {}
    for rank in sorted(values):
        by_value.setdefault(values[rank], []).append(rank)
    if len(by_value) < 2:
        return ""
    told = ", ".join(f"{value} on {in_words(ranks)}" for value, ranks in by_value.items())
    return f"{call_of(first)} has different {what}: {told}. All ranks must give it the same."


def _fixed(request: Request, place: int) -> str:
    """What of a shape must be equal."""
    shape = request.shapes[place]
    if request.verb in ("allgather", "alltoall") and shape:
        return f"[any, {', '.join(map(str, shape[1:]))}]" if len(shape) > 1 else "[any]"
    return str(list(shape))


_ASPECTS: tuple[tuple[str, Callable[[Request], str]], ...] = (
    ("calls", lambda request: request.verb),
    ("ops", lambda request: request.op or "none"),
    ("numbers of tensors", lambda request: str(len(request.dtypes))),
    ("dtypes", lambda request: ", ".join(request.dtypes)),
    ("devices", lambda request: request.device),
    ("root ranks", lambda request: str(request.root)),
    ("prescale factors", lambda request: str(request.prescale)),
    ("postscale factors", lambda request: str(request.postscale)),
    ("ranks", lambda request: str(list(request.ranks))),
)


def _impossible(first: Request, requests: Mapping[int, Request], ranks: tuple[int, ...]) -> Iterator[str]:
    if first.verb in ("allgather", "alltoall", "reducescatter") and not all(first.shapes):
        yield f"{call_of(first)} was given a tensor without dimensions. Give it one row: tensor.reshape(1)."
    if first.verb == "broadcast" and first.root not in ranks:
        yield f"{call_of(first)} has root rank {first.root}, which is not one of {list(ranks)}."
    if first.verb == "alltoall":
        for rank, request in requests.items():
            rows = request.shapes[0][0]
            if request.splits is None and rows % len(ranks):
                yield (
                    f"{call_of(first)} on rank {rank} has {rows} rows, which cannot be split equally over {len(ranks)} "
                    f"ranks. Give splits."
                )
            splits = request.splits
            if splits is not None and (len(splits) != len(ranks) or sum(splits) != rows or min(splits) < 0):
                yield (
                    f"{call_of(first)} on rank {rank} has splits {list(splits)}: they must be {len(ranks)} numbers "
                    f"that add up to its {rows} rows."
                )


def call_of(request: Request) -> str:
    if request.verb == "barrier":
        return "barrier"
    if request.verb in ("add_set", "remove_set"):
        return "add_process_set" if request.verb == "add_set" else "remove_process_set"
    return f"{request.verb} '{request.name.removeprefix(request.verb + '.')}'"


def in_words(ranks: object) -> str:
    listed = sorted(ranks)  # type: ignore[call-overload]
    if len(listed) == 1:
        return f"rank {listed[0]}"
    return f"ranks {', '.join(map(str, listed[:16]))}{' ...' if len(listed) > 16 else ''}"
