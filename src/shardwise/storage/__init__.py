"""Units chosen from a module tree, and the flat memory they live in."""

from shardwise.storage.dtypes import torch_dtype
from shardwise.storage.flat import Flat, FullState
from shardwise.storage.inbox import Inbox
from shardwise.storage.memory import is_dense
from shardwise.storage.overlap import agrees, copy_into, may_overlap
from shardwise.storage.rows import Row, rows_for
from shardwise.storage.select import UnitChoice, choose_units
from shardwise.storage.shared import share
from shardwise.storage.unit import Unit, make_unit, unit_spec

__all__ = [
    "Flat",
    "FullState",
    "Inbox",
    "Row",
    "Unit",
    "UnitChoice",
    "agrees",
    "choose_units",
    "copy_into",
    "is_dense",
    "make_unit",
    "may_overlap",
    "rows_for",
    "share",
    "torch_dtype",
    "unit_spec",
]
