"""How fast this machine computes, from which a hardware profile follows that holds for it alone.

All its ranks measure at once, because ranks on processors share cores and memory: each figure is what one of them gets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardwise.errors import ConfigError
from shardwise.fit.calibrate.links import measured_by_ranks
from shardwise.fit.calibrate.speeds import Speeds
from shardwise.fit.hardware import AttentionShare, Disk, FreshBlocks, Hardware, Host, Link, Products
from shardwise.system.calibration import Calibration
from shardwise.system.devices import RankDevice, TorchAccelerator
from shardwise.system.machine import describe_machine, memory_here, num_cores

COMMAND = "shardwise calibrate"
PROCESSOR_CONTENTION = 2.0
"""On processors the cores of a rank either copy or compute."""
DEVICE_CONTENTION = 1.1
CAUSAL_SHARE = 0.5
"""Of all pairs of positions, those that attention is measured with (`speed_rank.py`) computes."""
KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
"""The environment in which glibc keeps all memory for the next allocation."""


def num_measured_ranks() -> int:
    """One for each accelerator; on processors two, which share the cores evenly."""
    found = TorchAccelerator.found()
    return found.num_devices if found is not None else min(2, num_cores())


def this_machine() -> str:
    """As a calibration names it."""
    found = TorchAccelerator.found()
    names = () if found is None else tuple(RankDevice.of(found, index).identity for index in range(found.num_devices))
    return describe_machine(names)


def measured_speeds(dtypes: Sequence[str]) -> list[Speeds]:
    """Start ranks that measure, with memory that they keep: what new pages cost has a price of its own. One of each
    round."""
    rounds = measured_by_ranks("shardwise.fit.calibrate.speed_rank", num_measured_ranks(), dtypes, KEPT)
    return [Speeds(**one) for one in rounds]


def measured_fresh_blocks() -> FreshBlocks:
    """(bytes, seconds) of `Hardware.fresh_blocks`, by ranks whose allocator works as in any job. Those of
    devices keep what they have."""
    if TorchAccelerator.found() is not None:
        return ()
    rows = measured_by_ranks("shardwise.fit.calibrate.fresh_rank", num_measured_ranks(), (), {})
    return tuple((num_bytes, seconds) for num_bytes, seconds in rows)


def hardware_from(
    speeds: Speeds, known: Calibration, name: str, disk: Disk | None = None, fresh_blocks: FreshBlocks = ()
) -> Hardware:
    """The profile that follows from `speeds`, and from what `known` has of the host and its links."""
    if not any(speeds.products.values()):
        raise ConfigError(f"No product was measured, so there is nothing to calibrate with. Run {COMMAND} again.")
    fitted = {dtype: fit_products(rows) for dtype, rows in speeds.products.items()}
    peaks = {dtype: peak for dtype, (_, peak) in fitted.items()}
    products = {dtype: one for dtype, (one, _) in fitted.items()}
    attention, backward = (
        {dtype: fit_attention(rows, peaks[dtype]) for dtype, rows in some.items()}
        for some in (speeds.attention, speeds.attention_backward)
    )
    on_processor = speeds.device_memory_bytes is None
    memory = {dtype: min(1.0, _rate(rows) / speeds.copy_bytes_per_second) for dtype, rows in speeds.memory.items()}
    return Hardware(
        name=name,
        ranks_per_node=speeds.num_ranks,
        memory_bytes=speeds.device_memory_bytes or memory_here().total_bytes // speeds.num_ranks,
        memory_bytes_per_second=speeds.copy_bytes_per_second,
        peak_flops=peaks,
        products=next(iter(products.values())),
        attention=next(iter(attention.values())),
        products_in=products,
        attention_in=attention,
        attention_backward_in=backward,
        causal_share=CAUSAL_SHARE,
        memory_share=next(iter(memory.values())),
        memory_share_in=memory,
        flat_share=min(1.0, speeds.flat_bytes_per_second / speeds.copy_bytes_per_second),
        fresh_blocks=fresh_blocks,
        launch_seconds=speeds.launch_seconds,
        runs_ahead=not on_processor,
        contention=PROCESSOR_CONTENTION if on_processor else DEVICE_CONTENTION,
        ranks_share_device=on_processor,
        cores=num_cores() if on_processor else None,
        local=fit_link(speeds.messages, speeds.num_ranks, shared=on_processor),
        local_exchanges=fit_link(speeds.exchanges, speeds.num_ranks, shared=on_processor) if speeds.exchanges else None,
        network=_network(known),
        host=_host(known, on_processor=on_processor),
        disk=disk,
    )


Row = tuple[int, int, int, float]


def fit_products(rows: Sequence[Row]) -> tuple[Products, float]:
    """The parameters of `Products` for one dtype, and its peak rate.

    Seconds per FLOP are linear in 1, 1/area and 1/depth, so that least squares of relative errors find them.
    """
    area, depth = _losses(rows)
    products = Products(share=1.0, half_area=area, half_depth=depth)
    return products, _peak(rows, products.half_area, products.half_depth)


def _losses(rows: Sequence[Row]) -> tuple[float, float]:
    """`half_area` and `half_depth`, neither below 0."""
    slowness = np.array([seconds / (2.0 * m * n * k) for m, n, k, seconds in rows])
    first, by_area, by_depth = _solved([(1.0, 1 / (m * n), 1 / k) for m, n, k, _ in rows], slowness)
    return by_area / first, by_depth / first


def _solved(rows: Sequence[tuple[float, float, float]], slowness: np.ndarray) -> tuple[float, float, float]:
    """The factors, the first above 0 and none below, with which sums of terms come relatively nearest to `slowness`."""
    terms = np.array(rows)
    scales = terms.max(axis=0)  # of very different sizes otherwise, which least squares would take for rounding
    terms = terms / scales / slowness[:, None]
    best, least = np.zeros(3), float("inf")
    for kept in ([0], [0, 1], [0, 2], [0, 1, 2]):
        solved = np.linalg.lstsq(terms[:, kept], np.ones(len(rows)), rcond=None)[0]
        missed = float(np.square(terms[:, kept] @ solved - 1).sum())
        if solved[0] > 0 and (solved >= 0).all() and missed < least:
            best, least = np.zeros(3), missed
            best[kept] = solved
    first, second, third = (best / scales).tolist()
    return first, second, third


def _peak(rows: Sequence[Row], half_area: float, half_depth: float) -> float:
    """The rate at which predicted and measured seconds differ least, in logarithms."""
    rates = [2.0 * m * n * k * (1 + half_area / (m * n) + half_depth / k) / seconds for m, n, k, seconds in rows]
    return float(np.exp(np.mean(np.log(rates))))


def fit_attention(rows: Sequence[tuple[int, float, float]], peak: float) -> AttentionShare:
    """By the same means, of causal attention whose `rows` count all pairs: seconds per FLOP are linear in 1, 1/length
    and 1/length squared, which is what a head costs.

    One core took 0.44 ms for each head of a backward in bf16 over 128 positions, 0.64 ms over 256, 1.7 ms over 512 and
    4.7 ms over 1024; in fp32, and in forwards, a head by itself costs next to nothing.
    """
    slowness = np.array([seconds * peak / (CAUSAL_SHARE * flops) for _, flops, seconds in rows])
    first, by_length, by_scores = _solved([(1.0, 1 / length, 1 / length**2) for length, _, _ in rows], slowness)
    return AttentionShare(share=1 / first, half_length=by_length / first, half_scores=by_scores / first)


def fit_link(messages: Sequence[tuple[int, float]], num_ranks: int, *, shared: bool) -> Link:
    """From collectives among the ranks of this machine, of which each receives all but its own part. With one rank
    there is nothing to fit: memory's own figures."""
    if num_ranks < 2 or not messages:
        return Link(latency_seconds=1e-5, bytes_per_second=1e9, share=1.0)
    received = [num_bytes * (num_ranks - 1) / num_ranks for num_bytes, _ in messages]
    latency = min(seconds for _, seconds in messages) / (num_ranks - 1)
    rate = received[-1] / max(1e-9, messages[-1][1] - latency * (num_ranks - 1))
    return Link(
        latency_seconds=latency,
        bytes_per_second=rate,
        node_bytes_per_second=rate * num_ranks if shared else None,
        share=1.0,
    )


def _rate(rows: Sequence[tuple[float, float]]) -> float:
    return sum(num_bytes for num_bytes, _ in rows) / sum(seconds for _, seconds in rows)


def _network(known: Calibration) -> Link:
    """One machine cannot measure its network: messages over loopback stand for it."""
    rate = known.links.messages_bytes_per_second if known.links is not None else 1e9
    return Link(latency_seconds=5e-5, bytes_per_second=rate, node_bytes_per_second=rate, share=1.0)


def _host(known: Calibration, *, on_processor: bool) -> Host | None:
    if known.memory is None:
        return None
    link = None
    if not on_processor and known.links is not None and known.links.to_device_bytes_per_second:
        link = min(known.links.to_device_bytes_per_second, known.links.from_device_bytes_per_second)
    return Host(
        memory_bytes=memory_here().total_bytes,
        memory_bytes_per_second=known.memory.copy_bytes_per_second,
        adam_elements_per_second=known.memory.adam_elements_per_second,
        link_bytes_per_second=link,
    )


def calibrated_hardware(known: Calibration, machine: str) -> Hardware:
    """The profile in a calibration. Raises `ConfigError` if there is none, or if it is of another machine."""
    if known.hardware is None:
        raise ConfigError(f"This machine has not been measured. Run {COMMAND}, or give --hardware NAME.")
    if known.machine != machine:
        raise ConfigError(
            f"The calibration is of another machine: {known.machine!r}, and this is {machine!r}. Run {COMMAND} here, "
            f"or give --hardware NAME."
        )
    return hardware_of_file(known.hardware)


def hardware_of_file(values: Mapping[str, Any]) -> Hardware:
    """As a calibration has it. Files without `causal_share` have shares of all pairs of causal attention."""
    return Hardware.model_validate({"causal_share": 1.0, **values})
