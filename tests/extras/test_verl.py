"""verl's own trainers on our engine: losses, norms, rates and parameters are those of its own engine on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
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


ACTOR_IN_ZERO1 = [
    "actor_rollout_ref.actor.fsdp_config._target_=shardwise.integrations.verl.ShardwiseEngineConfig",
    "+actor_rollout_ref.actor.fsdp_config.plan=zero1",
]
OF_ACTOR = (
    "actor/pg_loss",
    "actor/entropy_loss",
    "actor/entropy",
    "actor/grad_norm",
    "actor/lr",
    "critic/rewards/mean",
)
OF_CRITIC = ("critic/vf_loss", "critic/grad_norm", "critic/values/mean", "critic/returns/mean")
OF_RL = {"ppo": (*OF_ACTOR, *OF_CRITIC, "actor/reward_kl_penalty"), "grpo": (*OF_ACTOR, "actor/kl_loss")}
"""What verl adds up over micro-batches and ranks; its other figures are means of means."""
MODELS_OF_RL = {"ppo": {"actor", "critic"}, "grpo": {"actor"}}


@pytest.mark.parametrize(("kind", "settings"), [("ppo", ACTOR_IN_ZERO1), ("grpo", [])])
def test_verl_s_trainer_of_ppo_and_grpo(kind: str, settings: list[str], tmp_path: Path) -> None:
    """Two steps, each of two epochs, with its actor, reference and critic; only ray and the sampler are stand-ins."""
    jobs.write_model(tmp_path / "model")
    jobs.write_model(tmp_path / "critic", "LlamaForTokenClassification")
    plain = begin(1, jobs.reinforced, str(tmp_path), "fsdp2", kind, [])
    ours = on_ranks(2, jobs.reinforced, str(tmp_path), "shardwise", kind, settings)
    expected = plain()[0]
    for rank in ours:
        assert [line["step"] for line in rank["logged"]] == [line["step"] for line in expected["logged"]] == [1, 2]
        for own, theirs in zip(rank["logged"], expected["logged"], strict=True):
            for name in OF_RL[kind]:
                assert own["data"][name] == pytest.approx(theirs["data"][name], rel=1e-4, abs=1e-5), name
        assert rank["params"].keys() == expected["params"].keys() == MODELS_OF_RL[kind]
        for model, params in expected["params"].items():
            assert rank["params"][model].keys() == params.keys()
            for name, value in params.items():
                found = torch.tensor(rank["params"][model][name])
                torch.testing.assert_close(found, torch.tensor(value), rtol=1e-4, atol=1e-5, msg=name)
        assert len(rank["versions"]) == 3, "at the start, and after each step"
        assert rank["versions"][0]["lm_head.weight"] != rank["versions"][1]["lm_head.weight"]
        for name, value in rank["versions"][2].items():
            assert value == torch.tensor(rank["params"]["actor"][name]).bfloat16().tolist(), name


HOST, BACK, TO_EVALUATE = ("cpu", "host", "host"), ("cuda", "device", "device"), ("cuda", "device", "host")


@pytest.mark.parametrize(
    ("settings", "moves", "words"),
    [
        (["engine.param_offload=true", "engine.optimizer_offload=true"], {HOST, BACK, TO_EVALUATE}, ""),
        (["engine.param_offload=true"], {HOST, BACK}, "param_offload moves optimizer states too"),
        (
            ["engine.param_offload=true", "engine.optimizer_offload=true", "+engine.plan=zero1"],
            {("cpu", "device", "host"), BACK, TO_EVALUATE},
            "param_offload is set and moves nothing: under the plan zero1",
        ),
    ],
)
def test_what_verl_offloads_is_on_the_host_between_its_phases(
    settings: list[str], moves: set[tuple[str, str, str]], words: str, tmp_path: Path
) -> None:
    jobs.write_model(tmp_path / "model")
    plain = begin(1, jobs.fine_tuned, str(tmp_path), "fsdp2", [], steps=2)
    ours = on_ranks(2, jobs.offloaded, str(tmp_path), [OURS, *settings], steps=2)
    expected, found = figures(plain()[0]), figures(ours[0]["logged"])
    assert len(expected["train/loss"]) == 2
    for name in FIGURES:
        assert found[name] == pytest.approx(expected[name], rel=1e-4), name
    for rank in ours:
        assert set(rank["moves"]) == moves
        assert rank["moves"][0] == rank["moves"][-1] != BACK
    assert words in ours[0]["said"]
    assert not (words == "" and "offload" in ours[0]["said"])


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
