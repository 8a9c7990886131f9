"""Places, the table, the presets, and the moves from one place to another. Pure."""

from shardwise.plan.placement.box import Box, Run, common_runs
from shardwise.plan.placement.layout import ALIGN, Layout, Slot, pack, pack_boxes, padded_numel
from shardwise.plan.placement.moves import Move, MoveVerb, moves
from shardwise.plan.placement.offload import Offloaded, UnitNumel, check_budget, check_offload, share_of_last
from shardwise.plan.placement.place import KINDS, WIDTH, Axes, Dtype, Kind, Place, Tier, wider
from shardwise.plan.placement.presets import (
    PRESETS,
    Preset,
    mesh_for,
    preset,
    resident_table,
    ruled_tables,
    table_for,
    takes_local_size,
)
from shardwise.plan.placement.span import Span
from shardwise.plan.placement.table import Table
from shardwise.plan.placement.wire import BITS, LOSS_DTYPE, Codes, SumOfCodes, Wire

__all__ = [
    "ALIGN",
    "BITS",
    "KINDS",
    "LOSS_DTYPE",
    "PRESETS",
    "WIDTH",
    "Axes",
    "Box",
    "Codes",
    "Dtype",
    "Kind",
    "Layout",
    "Move",
    "MoveVerb",
    "Offloaded",
    "Place",
    "Preset",
    "Run",
    "Slot",
    "Span",
    "SumOfCodes",
    "Table",
    "Tier",
    "UnitNumel",
    "Wire",
    "check_budget",
    "check_offload",
    "common_runs",
    "mesh_for",
    "moves",
    "pack",
    "pack_boxes",
    "padded_numel",
    "preset",
    "resident_table",
    "ruled_tables",
    "share_of_last",
    "table_for",
    "takes_local_size",
    "wider",
]
