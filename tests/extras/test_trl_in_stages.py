"""Trainers of TRL that generate, with a model in pipeline stages or split along tp, beside the same ones under DDP."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl_jobs
import trl_vllm_jobs
from rank_processes import begin, on_ranks

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.integrations.trl_shared_prompts import count_completions_once, require_known
from tests.thorough import sampled

pytestmark = pytest.mark.timeout(300)

MESHES: dict[str, tuple[int, int, dict[str, int]]] = {
    # ranks, ranks of DDP, mesh
    "pp": (2, 1, {"pp": 2}),
    "pp x dp": (4, 2, {"pp": 2, "dp": 2}),
    "dp x pp": (4, 2, {"dp": 2, "pp": 2}),
    "tp": (2, 1, {"dp": 1, "tp": 2}),
    "dp x tp": (4, 2, {"dp": 2, "tp": 2}),
    "pp x tp": (4, 1, {"pp": 2, "dp": 1, "tp": 2}),
}
NO_SYNC = {"sync_ref_model": False}
ONE_UPDATE = {"num_iterations": 1, **NO_SYNC}
SCRIPTS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo in micro-batches": {"gradient_accumulation_steps": 2, "steps_per_generation": 4, **ONE_UPDATE},
    "grpo with rounds in a step": {"gradient_accumulation_steps": 2, "steps_per_generation": 1, **ONE_UPDATE},
    "grpo with adapters": {"peft_config": trl_jobs.adapters(), **NO_SYNC},
    "grpo, evaluated": {"eval_strategy": "steps", "eval_steps": 3, "scale_rewards": "batch", "loss_type": "grpo"},
    "grpo, weights gathered for each token": {"ds3_gather_for_generation": False},
    "grpo of uncertain tokens": {"top_entropy_quantile": 0.5, "entropy_coef": 0.1},
    "rloo": {"kind": "rloo"},
    "rloo in micro-batches": {"kind": "rloo", "gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "rloo with adapters": {"kind": "rloo", "peft_config": trl_jobs.adapters(), **NO_SYNC},
}


def assert_same(runs: list[dict[str, Any]], plain: list[dict[str, Any]], mesh: sw.Mesh) -> None:
    """DDP numbers its ranks by their prompts. Parameters were measured to differ by up to 3e-7."""
    assert len(plain[0]["losses"]) == len(runs[0]["losses"]) > 2
    for rank, run in enumerate(runs):
        assert run["generated"] == plain[mesh.data_place(rank)[0]]["generated"]
        for figure in ("losses", "rates", "evaluations"):
            assert run[figure] == pytest.approx(plain[0][figure], abs=1e-5), figure
        assert run["norms"] == pytest.approx(plain[0]["norms"], rel=1e-5, abs=1e-5)  # RLOO's are about 50
        for figure, values in plain[0].get("logs", {}).items():
            assert run["logs"][figure] == pytest.approx(values, abs=1e-5), figure
        for parameter, value in plain[0]["state"].items():
            found = torch.tensor(run["state"][parameter])
            torch.testing.assert_close(found, torch.tensor(value), rtol=1e-5, atol=1e-6, msg=parameter)


def raced(mesh: str, job: Any, *args: Any, **settings: Any) -> None:
    ranks, peers, axes = MESHES[mesh]
    plain = begin(peers, job, *args, None, **settings)
    runs = on_ranks(ranks, job, *args, {"preset": "zero3", "mesh": axes}, **settings)
    expected = plain()
    if peers > 1:
        assert expected[0]["generated"] != expected[1]["generated"]
    assert_same(runs, expected, sw.Mesh.of(axes, ranks))


@sampled
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("script", SCRIPTS)
def test_completions_are_generated_and_rewarded_as_under_ddp(script: str, mesh: str) -> None:
    raced(mesh, trl_jobs.rewarded, **SCRIPTS[script])


@sampled
@pytest.mark.parametrize("mesh", MESHES)
def test_online_dpo(mesh: str) -> None:
    raced(mesh, trl_vllm_jobs.alone, "online_dpo")


@sampled
@pytest.mark.parametrize("mesh", ["pp", "pp x dp", "tp"])  # an engine of vLLM in each rank has the seed of its number
@pytest.mark.parametrize("mode", ["served", "colocated"])
@pytest.mark.parametrize("name", ["grpo", "rloo", "online_dpo"])
def test_samples_of_vllm(name: str, mode: str, mesh: str) -> None:
    raced(mesh, getattr(trl_vllm_jobs, mode), name)


@sampled
@pytest.mark.parametrize(("job", "args"), [(trl_jobs.rewarded, ()), (trl_vllm_jobs.alone, ("online_dpo",))])
def test_rewards_of_the_first_rank_count(job: Any, args: tuple[str, ...]) -> None:
    """Such as random ones, which differ from rank to rank."""
    raced("pp", job, *args, misled_from=1)


def test_other_trainers_that_generate_are_refused() -> None:
    plan = sw.load_plan({"preset": "zero1", "mesh": {"pp": 2}})
    with pytest.raises(ConfigError, match="SimpleNamespace is that of a trainer which generates"):
        require_known(SimpleNamespace(use_vllm=False), plan)


def test_a_round_has_whole_groups() -> None:
    args = SimpleNamespace(
        world_size=4, per_device_train_batch_size=2, steps_per_generation=1, num_generations=4, do_eval=False
    )
    count_completions_once(args, 2)
    assert args.generation_batch_size == 4
    args.num_generations = 8
    with pytest.raises(ConfigError, match="A round of generation has 4 completions where ranks share prompts"):
        count_completions_once(args, 2)
