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
