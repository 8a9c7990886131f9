"""Trainers of TRL that sample by vLLM, of which there are stand-ins: what these get is the model, and a run is that of
TRL's own path under DDP."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl_vllm_jobs as jobs
from rank_processes import begin, on_ranks
from trl_jobs import adapters

from shardwise.errors import ConfigError
from shardwise.integrations.trl import feed_generation

pytestmark = pytest.mark.timeout(300)
PAIR = {"preset": "zero3", "mesh": {"dp": 1, "sp": 2}}


def assert_same_run(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    assert ours["generated"] == expected["generated"]
    assert len(ours["losses"]) == 3
    for figure in ("losses", "norms"):
        assert ours[figure] == pytest.approx(expected[figure], abs=1e-5), figure


def assert_same_weights(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    """Of each of three rounds of updates."""
    assert len(ours["synced"]) == len(expected["synced"]) == 3
    for arrived, at_ddp in zip(ours["synced"], expected["synced"], strict=True):
        assert arrived.keys() == at_ddp.keys()
        for parameter, value in at_ddp.items():
            torch.testing.assert_close(torch.tensor(arrived[parameter]), torch.tensor(value), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["grpo", "rloo", "online_dpo"])
def test_a_server_gets_the_weights_of_all_ranks(name: str) -> None:
    plain = begin(2, jobs.served, name, None)
    ours = on_ranks(2, jobs.served, name, "zero3")[0]
    expected = plain()[0]
    assert_same_run(ours, expected)
    assert_same_weights(ours, expected)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("grpo", {}),
        ("grpo", {"vllm_enable_sleep_mode": True}),
        ("grpo", {"peft_config": adapters()}),
        ("online_dpo", {"vllm_enable_sleep_mode": True}),
    ],
)
def test_an_engine_in_each_rank_gets_the_weights_of_all(name: str, settings: dict[str, Any]) -> None:
    plain = begin(2, jobs.colocated, name, None, **settings)
    ours = on_ranks(2, jobs.colocated, name, "zero3", **settings)
    expected = plain()
    assert expected[0]["generated"] != expected[1]["generated"]
    for of_rank, plainly in zip(ours, expected, strict=True):
        assert_same_weights(of_rank, plainly)
        assert of_rank["generated"] == plainly["generated"]
    assert_same_run(ours[0], expected[0])


def test_online_dpo_generates_by_itself_as_under_ddp() -> None:
    plain = begin(2, jobs.alone, "online_dpo", None)
    ours = on_ranks(2, jobs.alone, "online_dpo", "zero3")
    for of_rank, plainly in zip(ours, plain(), strict=True):
        assert of_rank["generated"] == plainly["generated"]
        if of_rank is ours[0]:
            assert_same_run(of_rank, plainly)


@pytest.mark.parametrize("name", ["grpo", "online_dpo"])
def test_ranks_that_share_samples_are_refused(name: str) -> None:
    with pytest.raises(RuntimeError, match="has sp, but trainers of TRL that generate take log-probabilities of whole"):
        on_ranks(2, jobs.alone, name, PAIR)


def test_a_way_to_vllm_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="would take shards for whole weights"):
        feed_generation(SimpleNamespace(args=SimpleNamespace(use_vllm=True)))
