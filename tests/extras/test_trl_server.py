"""Trainers of TRL that sample by a server of vLLM, of which there is a stand-in: what it gets is the model, and a run
is that of TRL's own path under DDP."""

from __future__ import annotations

import pytest
import torch
import trl_server_jobs as jobs
from rank_processes import begin, on_ranks

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_a_server_gets_the_weights_of_all_ranks(name: str) -> None:
    plain = begin(2, jobs.served, name, None)
    ours = on_ranks(2, jobs.served, name, "zero3")[0]
    expected = plain()[0]
    assert ours["generated"] == expected["generated"]
    assert len(ours["losses"]) == 3
    for figure in ("losses", "norms"):
        assert ours[figure] == pytest.approx(expected[figure], abs=1e-5), figure
    assert len(ours["synced"]) == len(expected["synced"]) == 3
    for arrived, at_ddp in zip(ours["synced"], expected["synced"], strict=True):
        assert arrived.keys() == at_ddp.keys()
        for parameter, value in at_ddp.items():
            torch.testing.assert_close(torch.tensor(arrived[parameter]), torch.tensor(value), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("trainer", "mode", "words"),
    [("grpo", "colocate", "Use vllm_mode='server'"), ("online_dpo", "server", "GRPOTrainer and RLOOTrainer can")],
)
def test_what_cannot_be_fed_is_refused(trainer: str, mode: str, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        on_ranks(1, jobs.refused, trainer, mode)
