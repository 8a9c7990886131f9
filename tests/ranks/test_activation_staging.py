"""Host memory through which activations go to a disk: predicted, and never more than that however slow the disk is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from twins import batches, work_on_ranks

import shardwise as sw
from shardwise.fit import stage_rehearsal
from shardwise.runtime.activations import on_disk
from tests.models import Transformer
from tests.thorough import sampled, thorough_only

PLANS: dict[str, dict[str, Any]] = {
    "all": {"preset": "zero3"},
    "accumulated": {"preset": "infinity", "accumulate": 2},
    "staged": {"preset": "zero1", "mesh": {"pp": 2, "dp": 1}, "accumulate": 4, "pipeline": {"schedule": "1f1b"}},
    "looped": {
        "preset": "zero1",
        "mesh": {"pp": 2, "dp": 1},
        "accumulate": 4,
        "pipeline": {"schedule": "interleaved"},
    },
}
LIMITS = {"enough": 2**28, "little": 2**18}


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("case", PLANS)
def test_no_more_is_staged_than_promised(
    case: str, limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With any disk; one that has written nothing until it is waited for takes exactly as much."""
    monkeypatch.setattr(on_disk, "BEHIND_BYTES", LIMITS[limit])
    monkeypatch.setattr(stage_rehearsal, "BEHIND_BYTES", LIMITS[limit])
    torch.manual_seed(0)
    model, (batch,) = Transformer(num_blocks=4), batches(1, rows=48)
    plan = {**PLANS[case], "activations": "disk", "disk": str(tmp_path)}
    micro_batch = tuple(part[:12] for part in batch) if "pipeline" in plan else batch

    def run() -> list[tuple[int, int, int]]:

        def work(engine: sw.Engine) -> tuple[int, int, int]:
            promised = engine.rehearse(micro_batch)
            for _ in range(2):
                if "pipeline" in plan:
                    engine.train_step(batch)
                    continue
                for _ in range(plan.get("accumulate", 1)):
                    engine.backward(engine(*batch))
                engine.step()
            report = engine.memory()
            assert promised.host is not None
            assert promised.disk is not None
            assert report.promised_on_host["staging"] == promised.host.staging
            assert report.measured_on_disk["activations"] <= promised.disk.activations
            return promised.host.staging, report.measured_on_host["staging"], promised.disk.activations

        return work_on_ranks(2, work, plan, model)

    for promised, measured, promised_on_disk in run():
        assert 0 < measured <= promised <= promised_on_disk
    monkeypatch.setattr(on_disk._OnDisk, "is_written", property(lambda one: one._writing is None))
    for promised, measured, _ in run():
        assert measured <= promised
        assert measured == promised or "pipeline" in plan
