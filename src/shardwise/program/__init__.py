"""The program of a step: actions whose text parses back; build, prefetch, streams, check, render. Pure."""

from shardwise.program.action import (
    AFTER_STEP,
    ALL_FLATS,
    BEFORE_STEP,
    DURING_STEP,
    END_OF_BACKWARD,
    Action,
    Block,
    Moment,
    Program,
    UnitMoments,
)
from shardwise.program.activations import Activations, Mark
from shardwise.program.build import (
    backward_makes,
    build_pass,
    build_step,
    drop_due,
    fills_grad,
    gather_due,
    norms_axes,
    norms_numel,
    reduce_due,
    step_gradients,
    verdict_dtype,
    verdict_numel,
)
from shardwise.program.check import check, check_step
from shardwise.program.effects import COMPUTES, EFFECTS, Buffer, Effect, Subject, Verb, adds_in_place
from shardwise.program.footprint import NUM_KEPT_BLOCKS, Footprint, footprint
from shardwise.program.matrix_exchange import Matrix, MatrixExchange, matrix_exchanges
from shardwise.program.plan import StepProgram, plan_step
from shardwise.program.prefetch import prefetch
from shardwise.program.render import parse, render, shortened
from shardwise.program.spec import FlatSpec, Trace, UnitSpec, straight_trace
from shardwise.program.streams import overlap, serial
from shardwise.program.update import BLOCK, OPTIMIZERS, SMALL_NUMEL, PlacedUpdate, States, Update, state_of, update_by

__all__ = [
    "AFTER_STEP",
    "ALL_FLATS",
    "BEFORE_STEP",
    "BLOCK",
    "COMPUTES",
    "DURING_STEP",
    "EFFECTS",
    "END_OF_BACKWARD",
    "NUM_KEPT_BLOCKS",
    "OPTIMIZERS",
    "SMALL_NUMEL",
    "Action",
    "Activations",
    "Block",
    "Buffer",
    "Effect",
    "FlatSpec",
    "Footprint",
    "Mark",
    "Matrix",
    "MatrixExchange",
    "Moment",
    "PlacedUpdate",
    "Program",
    "States",
    "StepProgram",
    "Subject",
    "Trace",
    "UnitMoments",
    "UnitSpec",
    "Update",
    "Verb",
    "adds_in_place",
    "backward_makes",
    "build_pass",
    "build_step",
    "check",
    "check_step",
    "drop_due",
    "fills_grad",
    "footprint",
    "gather_due",
    "matrix_exchanges",
    "norms_axes",
    "norms_numel",
    "overlap",
    "parse",
    "plan_step",
    "prefetch",
    "reduce_due",
    "render",
    "serial",
    "shortened",
    "state_of",
    "step_gradients",
    "straight_trace",
    "update_by",
    "verdict_dtype",
    "verdict_numel",
]
