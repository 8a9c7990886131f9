"""Checks the ranks' requests for one collective, and describes mismatches and invalid arguments. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from shardwise.integrations.horovod.messages import Request

_INTEGER_OPS = ("Average", "Sum", "Min", "Max", "Product")
_OPS_BY_DTYPE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("float16", "bfloat16", "float32", "float64"), (*_INTEGER_OPS, "Adasum")),
    **dict.fromkeys(("int8", "int16", "int32", "int64", "uint8"), _INTEGER_OPS),
    **dict.fromkeys(("complex64", "complex128"), ("Average", "Sum", "Product")),
    "bool": ("Sum", "Min", "Max", "Product"),
}
"""The reductions of each dtype. A sum of bools is true if any of them is."""


def mismatch(requests: Mapping[int, Request]) -> str:
    """An error text if the ranks' requests under one name do not match; else `""`."""
    first = next(iter(requests.values()))
    same = all(request is first or request == first for request in requests.values())
    if not same:
        for what, value in _ASPECTS:
            label = "process sets" if what == "root ranks" and first.verb == "remove_set" else what
            error = _difference(first, label, {rank: value(request) for rank, request in requests.items()})
            if error:
                return error
        for index in range(len(first.shapes)):
            label = "shapes" if len(first.shapes) == 1 else f"shapes of tensor {index}"
            shapes = {rank: _common_shape(request, index) for rank, request in requests.items()}
            error = _difference(first, label, shapes)
            if error:
                return error
    return ""


def why_invalid(requests: Mapping[int, Request], ranks: tuple[int, ...]) -> str:
    """An error text if requests that match cannot be carried out; else `""`."""
    return next(_invalid(next(iter(requests.values())), requests, ranks), "")


def _difference(first: Request, what: str, values: Mapping[int, str]) -> str:
    by_value: dict[str, list[int]] = {}
    for rank in sorted(values):
        by_value.setdefault(values[rank], []).append(rank)
    if len(by_value) < 2:
        return ""
    listed = ", ".join(f"{value} on {in_words(ranks)}" for value, ranks in by_value.items())
    return f"{call_of(first)} has different {what}: {listed}. They must be the same on all ranks."


def _common_shape(request: Request, index: int) -> str:
    """The part of a tensor's shape that must be equal on all ranks."""
    shape = request.shapes[index]
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


def _invalid(first: Request, requests: Mapping[int, Request], ranks: tuple[int, ...]) -> Iterator[str]:
    if first.verb in ("allreduce", "reducescatter"):
        yield from _unsupported_reductions(first, ranks)
    if first.verb in ("allgather", "alltoall", "reducescatter") and not all(first.shapes):
        yield f"{call_of(first)} was given a tensor without dimensions. Use tensor.reshape(1)."
    if first.verb == "broadcast" and first.root not in ranks:
        yield f"{call_of(first)} has root rank {first.root}, which is not one of {list(ranks)}."
    if first.verb == "alltoall":
        for rank, request in requests.items():
            rows = request.shapes[0][0]
            if request.splits is None and rows % len(ranks):
                yield (
                    f"{call_of(first)} on rank {rank} has {rows} rows, which cannot be split equally among "
                    f"{len(ranks)} ranks. Pass splits."
                )
            splits = request.splits
            if splits is not None and (len(splits) != len(ranks) or sum(splits) != rows or min(splits) < 0):
                yield (
                    f"{call_of(first)} on rank {rank} has splits {list(splits)}: they must be {len(ranks)} numbers "
                    f"that add up to its {rows} rows."
                )


def _unsupported_reductions(first: Request, ranks: tuple[int, ...]) -> Iterator[str]:
    if first.op == "Adasum" and len(ranks) & (len(ranks) - 1):
        yield f"{call_of(first)} uses Adasum on {len(ranks)} ranks. Adasum needs a power of two: 1, 2, 4, 8, ..."
    for dtype in dict.fromkeys(first.dtypes):
        ops = _OPS_BY_DTYPE.get(dtype, ())
        if first.op not in ops:
            cure = f"Use one of {', '.join(ops)}, or cast it" if ops else "Cast it to a supported dtype"
            yield f"{call_of(first)} cannot reduce {dtype} tensors by {first.op}. {cure}."


def call_of(request: Request) -> str:
    return describe(request.verb, request.name)


def describe(verb: str, name: str) -> str:
    """A call as a user knows it, such as `allreduce 'w'`."""
    if verb == "barrier":
        return "barrier"
    if verb in ("add_set", "remove_set"):
        return "add_process_set" if verb == "add_set" else "remove_process_set"
    return f"{verb} '{name.removeprefix(verb + '.')}'"


def in_words(ranks: object) -> str:
    listed = sorted(ranks)  # type: ignore[call-overload]
    if len(listed) == 1:
        return f"rank {listed[0]}"
    return f"ranks {', '.join(map(str, listed[:16]))}{' ...' if len(listed) > 16 else ''}"
