"""The program of a step: actions whose text parses back; build, prefetch, streams, check, render. Pure."""

from shardwise.program.action import (
    AFTER_STEP,
    ALL_FLATS,
    BEFORE_STEP,
    END_OF_BACKWARD,
    Action,
    Block,
    Moment,
    Program,
)
from shardwise.program.build import (
    build_pass,
    build_step,
    drop_due,
    gather_due,
    reduce_due,
    step_gradients,
    verdict_numel,
)
from shardwise.program.check import check
from shardwise.program.footprint import Footprint, footprint
from shardwise.program.plan import StepProgram, plan_step
from shardwise.program.prefetch import prefetch
from shardwise.program.render import parse, render, shortened
from shardwise.program.spec import FlatSpec, Trace, UnitSpec, straight_trace
from shardwise.program.streams import overlap, serial

__all__ = [
    "AFTER_STEP",
    "ALL_FLATS",
    "BEFORE_STEP",
    "END_OF_BACKWARD",
    "Action",
    "Block",
    "FlatSpec",
    "Footprint",
    "Moment",
    "Program",
    "StepProgram",
    "Trace",
    "UnitSpec",
    "build_pass",
    "build_step",
    "check",
    "drop_due",
    "footprint",
    "gather_due",
    "overlap",
    "parse",
    "plan_step",
    "prefetch",
    "reduce_due",
    "render",
    "serial",
    "shortened",
    "step_gradients",
    "straight_trace",
    "verdict_numel",
]
