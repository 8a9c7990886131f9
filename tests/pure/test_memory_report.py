"""The bytes of a rank as a person reads them."""

from __future__ import annotations

from shardwise.sharded.engine_report import MemoryReport


def test_a_report_of_memory_prints_as_a_table() -> None:
    promised = {"param": 2048, "grad": 1024, "optim": 4096, "working": 512}
    measured = {**promised, "working": 500}
    replicated = {**promised, "param": 3 * 2**20}
    assert str(MemoryReport(promised, measured, replicated)).splitlines() == [
        "bytes of this rank  promised  measured  if replicated",
        "param                2.0 KiB   2.0 KiB        3.0 MiB",
        "grad                 1.0 KiB   1.0 KiB        1.0 KiB",
        "optim                4.0 KiB   4.0 KiB        4.0 KiB",
        "working                512 B     500 B          512 B",
        "in all               7.5 KiB   7.5 KiB        3.0 MiB",
    ]


def test_a_report_says_where_malloc_keeps_more_than_is_promised() -> None:
    kinds = {"param": 1, "grad": 2, "optim": 3, "working": 4}
    told = str(MemoryReport(kinds, kinds, kinds, keeps_freed_blocks=True)).splitlines()[-1]
    assert "the process holds more than a plan foresees: start ranks with `shardwise launch`" in told
    assert "malloc" not in str(MemoryReport(kinds, kinds, kinds))
