"""Pipeline parallelism: a model's modules are split into stages along the mesh axis `pp`, and steps run through
them."""

from shardwise.parallel.pipeline.copies import Copies
from shardwise.parallel.pipeline.pipeline import Pipeline
from shardwise.parallel.pipeline.sends import most_under_way
from shardwise.parallel.pipeline.stage_layout import (
    AXIS,
    StageLayout,
    balanced,
    sequence_of,
    stage_layout,
    stage_warnings,
)
from shardwise.parallel.pipeline.stage_messages import StageMessageLayout
from shardwise.parallel.pipeline.staged_model import StagedModel, stage_boxes
from shardwise.parallel.pipeline.tied_gradients import SharedGradients
from shardwise.parallel.pipeline.weight_grads import Aside, WeightGrads, backward_of_weights
from shardwise.parallel.pipeline.whole_model import holders_of
from shardwise.parallel.pipeline.whole_tensors import AcrossStages

__all__ = [
    "AXIS",
    "AcrossStages",
    "Aside",
    "Copies",
    "Pipeline",
    "SharedGradients",
    "StageLayout",
    "StageMessageLayout",
    "StagedModel",
    "WeightGrads",
    "backward_of_weights",
    "balanced",
    "holders_of",
    "most_under_way",
    "sequence_of",
    "stage_boxes",
    "stage_layout",
    "stage_warnings",
]
