"""Pipeline parallelism: a model's modules are split into stages along the mesh axis `pp`, and steps run through
them."""

from shardwise.pipeline.across import AcrossStages
from shardwise.pipeline.layout import AXIS, StageLayout, has_pipeline, stage_layout, stage_warnings
from shardwise.pipeline.messages import most_under_way
from shardwise.pipeline.parcels import Layout, Parcel, ParcelLayout
from shardwise.pipeline.pipeline import Pipeline, Trainer
from shardwise.pipeline.shared import SharedGradients
from shardwise.pipeline.staged import PLAIN_LOOP, StagedModel
from shardwise.pipeline.weight_grads import Aside, WeightGrads, backward_of_weights

__all__ = [
    "AXIS",
    "PLAIN_LOOP",
    "AcrossStages",
    "Aside",
    "Layout",
    "Parcel",
    "ParcelLayout",
    "Pipeline",
    "SharedGradients",
    "StageLayout",
    "StagedModel",
    "Trainer",
    "WeightGrads",
    "backward_of_weights",
    "has_pipeline",
    "most_under_way",
    "stage_layout",
    "stage_warnings",
]
