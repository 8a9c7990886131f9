"""Pipeline parallelism: a model's modules dealt out as stages over the mesh axis `pp`, and the steps through them."""

from shardwise.pipeline.across import AcrossStages
from shardwise.pipeline.layout import AXIS, StageLayout, has_pipeline, stage_layout
from shardwise.pipeline.pipeline import Pipeline, Trainer
from shardwise.pipeline.shared import SharedGradients
from shardwise.pipeline.staged import PLAIN_LOOP, StagedModel

__all__ = [
    "AXIS",
    "PLAIN_LOOP",
    "AcrossStages",
    "Pipeline",
    "SharedGradients",
    "StageLayout",
    "StagedModel",
    "Trainer",
    "has_pipeline",
    "stage_layout",
]
