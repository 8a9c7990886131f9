"""Scripts of Trainer, TRL and Lightning whose models are in pipeline stages, compared with the same ones without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import stage_jobs as jobs
import torch
from rank_processes import begin, on_ranks

from tests.thorough import sampled

pytestmark = pytest.mark.timeout(300)

MESHES: dict[str, tuple[int, int, dict[str, int]]] = {
    # ranks, ranks of DDP, mesh
    "pp": (2, 1, {"pp": 2}),
    "pp x dp": (4, 2, {"pp": 2, "dp": 2}),
    "pp x tp": (4, 1, {"pp": 2, "dp": 1, "tp": 2}),
}
WITH_EXPERTS: dict[str, tuple[int, int, dict[str, int]]] = {
    "pp x ep": (4, 2, {"pp": 2, "ep": 2}),
    "pp x dp x ep": (8, 4, {"pp": 2, "dp": 2, "ep": 2}),
}
LARGE_EPS = {"adam_epsilon": 1e-3}
"""With its own, rounding decides on updates where gradients are nearly zero: by 1.2e-5 along tp."""
SCRIPTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "packed documents": (jobs.packed, {}),
    "one micro-batch": (jobs.language, {"gradient_accumulation_steps": 1}),
    "three micro-batches": (jobs.language, {"gradient_accumulation_steps": 3}),
    "recomputed": (jobs.language, {"activation_checkpointing": True}),
    "smoothed labels": (jobs.language, {"label_smoothing_factor": 0.1}),
    "a loss of its own": (jobs.own_loss, {}),
    "classified tokens": (jobs.tokens_labelled, {}),
    "classified sequences": (jobs.sequences_labelled, {"label_smoothing_factor": 0.1}),
    "classified images": (jobs.images_labelled, {}),
    "images with their texts": (jobs.matched, {"kind": "clip", **LARGE_EPS}),
    "images and texts by pairs": (jobs.matched, {"kind": "siglip", **LARGE_EPS}),
    "images in some texts": (jobs.seen_in_text, LARGE_EPS),
    "masked tokens": (jobs.masked, {}),
    "multiple choice": (jobs.chosen, {}),
    "questions": (jobs.answered, {}),
    "sft": (jobs.supervised, {}),
    "sft with lora": (jobs.supervised, {"is_adapted": True}),
    "sft with packing": (jobs.supervised, {"packing": True}),
    "dpo with known log-probabilities": (jobs.preferred, {"precompute_ref_log_probs": True, **LARGE_EPS}),
    "dpo whose reference follows": (jobs.preferred, {"sync_ref_model": True, "ref_model_sync_steps": 2, **LARGE_EPS}),
    "gathered as objects": (jobs.language, {"eval_use_gather_object": True}),
    "t5": (jobs.translated, {"kind": "t5"}),
    "whisper": (jobs.translated, {"kind": "whisper"}),
}


def assert_same(run: dict[str, Any], plain: dict[str, Any], within: float = 1e-5, further: float = 1e-5) -> None:
    """`further`: how far norms, relatively, and parameters may be from plain ones."""
    for name in ("losses", "norms", "rates", "evaluations", "by_token"):
        rel = further if name == "norms" else None
        assert run[name] == pytest.approx(plain[name], abs=within, rel=rel), name
    for name in ("generated", "predicted", "best"):
        assert run.get(name) == plain.get(name), name
    assert run["state"].keys() == plain["state"].keys()
    for name, value in plain["state"].items():
        torch.testing.assert_close(torch.tensor(run["state"][name]), torch.tensor(value), rtol=within, atol=further)


def race(job: Any, ranks: int, peers: int, axes: dict[str, int], folder: Path, **settings: Any) -> None:
    """A script in stages on `ranks`, and without on the `peers` of DDP."""
    folders: list[dict[str, Any]] = [{}, {}]
    if job is jobs.preferred:
        folders = [{"folder": str(folder / name)} for name in ("theirs", "ours")]
        for one in folders:
            jobs.keep_preferences(one["folder"])
    plain = begin(peers, job, None, **settings, **folders[0])
    ours = on_ranks(ranks, job, {"preset": "zero1", "mesh": axes}, **settings, **folders[1])
    expected = plain()[0]
    assert len(expected["losses"]) == 4
    for run in ours:
        assert_same(run, expected)
        if expected.get("reference"):
            assert run["reference"] < expected["reference"]  # in stages too


@sampled
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_trains_as_without_stages(script: str, mesh: str, tmp_path: Path) -> None:
    job, settings = SCRIPTS[script]
    race(job, *MESHES[mesh], tmp_path, **settings)


NO_LOSS_OF_ROUTERS = {"router_aux_loss_coef": 0.0}
"""TRL's trainers add one of all layers, unless they are told not to; a pipeline refuses it."""
OF_EXPERTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "language": (jobs.of_experts, {}),
    "classified sequences": (jobs.sequences_labelled, {"model": "mixtral"}),
    "sft with lora": (jobs.supervised, {"model": "mixtral", "is_adapted": True, **NO_LOSS_OF_ROUTERS}),
    "dpo": (jobs.preferred, {"model": "mixtral", **NO_LOSS_OF_ROUTERS}),
}


@sampled
@pytest.mark.parametrize("mesh", WITH_EXPERTS)
@pytest.mark.parametrize("script", OF_EXPERTS)
def test_a_mixture_of_experts(script: str, mesh: str, tmp_path: Path) -> None:
    job, settings = OF_EXPERTS[script]
    ranks, peers, axes = WITH_EXPERTS[mesh]
    rows = {"per_device_train_batch_size": 4 // peers, "per_device_eval_batch_size": 4 // peers}
    race(job, ranks, peers, axes, tmp_path, **rows, **settings)


@sampled
@pytest.mark.parametrize("mesh", MESHES)
def test_masks_are_drawn_alike_beside_dropout(mesh: str) -> None:
    """Stages drop different numbers of features, and their collators go on with the same random numbers."""
    ranks, _, axes = MESHES[mesh]
    runs = on_ranks(ranks, jobs.masked, {"preset": "zero1", "mesh": axes}, dropout=0.3, max_steps=8)
    for run in runs:
        assert_same(run, runs[0])
    assert len(runs[0]["losses"]) == 8


@sampled
@pytest.mark.parametrize(
    ("mesh", "then"), [("pp x dp", (4, {"pp": 4})), ("pp x dp", (2, {"dp": 2})), ("pp x tp", (2, {"pp": 2}))]
)
def test_the_best_checkpoint_is_loaded_and_others_resumed(mesh: str, then: tuple[int, Any], tmp_path: Path) -> None:
    """With another number of stages, whose ranks have as many batches."""
    ranks, peers, axes = MESHES[mesh]
    plain = begin(peers, jobs.saved, None, str(tmp_path / "theirs"))
    ours = on_ranks(ranks, jobs.saved, {"preset": "zero2", "mesh": axes}, str(tmp_path / "ours"))
    expected = plain()[0]
    for run in ours:
        # Trainer's AdamW has a small `eps`: where a gradient is nearly zero, rounding decides how long an update is. So
        # norms are up to 1.2e-4 apart in the sixth step, and losses 1.1e-5 (on a Xeon without AMX).
        assert_same(run, expected, within=5e-5, further=3e-4)
        assert run["bests_loss"] == pytest.approx(expected["bests_loss"], abs=5e-5)
    num_ranks, others = then
    rows = {"per_device_train_batch_size": 2 * peers // others.get("dp", 1)}
    resumed = on_ranks(num_ranks, jobs.resumed, {"preset": "zero3", "mesh": others}, str(tmp_path / "ours"), **rows)
    assert resumed[0]["losses"] == pytest.approx(expected["losses"], abs=5e-5)


def test_an_encoder_decoder_of_lightning(tmp_path: Path) -> None:
    """Trained as by DDP; what it generates is the same on all ranks."""
    plain = begin(2, jobs.of_lightning, None, str(tmp_path))
    ours = on_ranks(4, jobs.of_lightning, {"preset": "zero3", "mesh": {"pp": 2, "dp": 2}}, str(tmp_path))
    expected = plain()
    for rank, run in enumerate(ours):
        twin = expected[rank % 2]
        assert run["losses"] == pytest.approx(twin["losses"], abs=1e-5)
        assert run["generated"] == twin["generated"]
        for name, value in twin["state"].items():
            torch.testing.assert_close(torch.tensor(run["state"][name]), torch.tensor(value), rtol=1e-5, atol=1e-5)
    assert len(expected[0]["losses"]) == 12


def test_lightning_by_hand(tmp_path: Path) -> None:
    plain = begin(1, jobs.by_hand, None, str(tmp_path))
    ours = on_ranks(2, jobs.by_hand, {"preset": "zero1", "mesh": {"pp": 2}}, str(tmp_path))
    expected = plain()[0]
    assert len(expected["losses"]) == 8
    for run in ours:
        assert run["losses"] == pytest.approx(expected["losses"], abs=1e-5)
        for name, value in expected["state"].items():
            torch.testing.assert_close(torch.tensor(run["state"][name]), torch.tensor(value), rtol=1e-5, atol=1e-5)
