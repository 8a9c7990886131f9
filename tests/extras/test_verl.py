"""verl's own SFT trainer on our engine: losses, norms and rates are those of its own engine on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import verl_jobs as jobs
from rank_processes import begin, on_ranks

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(not jobs.FOLDER.is_dir(), reason="verl is not installed (tests/extras/verl.txt)"),
]
OURS = "engine._target_=shardwise.integrations.verl.ShardwiseEngineConfig"
FIGURES = ("train/loss", "train/grad_norm", "train/lr", "val/loss")


def figures(logged: list[dict[str, Any]]) -> dict[str, list[float]]:
    return {name: [line["data"][name] for line in logged if name in line["data"]] for name in FIGURES}


def test_verl_s_trainer_trains_and_resumes_as_on_one_process(tmp_path: Path) -> None:
    jobs.write_model(tmp_path / "model")
    plain = begin(1, jobs.fine_tuned, str(tmp_path), "fsdp2", [])
    begun = figures(on_ranks(2, jobs.fine_tuned, str(tmp_path), "shardwise", [OURS], steps=2)[0])
    resumed = figures(
        on_ranks(2, jobs.fine_tuned, str(tmp_path), "shardwise", [OURS, "+engine.plan=zero1"], resumes=True)[0]
    )
    expected = figures(plain()[0])
    assert len(expected["train/loss"]) == 4
    for name in FIGURES:
        assert begun[name] + resumed[name] == pytest.approx(expected[name], rel=1e-4), name


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"qat": {"enable": True}}, "qat.enable is not supported"),
        ({"mixed_precision": {"param_dtype": "fp16"}}, "Use bf16 or fp32"),
        ({"plan": {"mesh": {"pp": 2}}}, "whole logits"),
        ({"plan": {"accumulate": 2}}, "Leave accumulate out"),
    ],
)
def test_settings_without_a_meaning_here_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        on_ranks(1, jobs.planned, settings)
