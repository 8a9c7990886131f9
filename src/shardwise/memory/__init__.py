"""Units chosen from a module tree, and the flat memory they live in."""

from shardwise.memory.at_rest import AtRest, is_at_rest
from shardwise.memory.boxes import part_of, put_part
from shardwise.memory.coded_rows import CodedRows, Rows
from shardwise.memory.disk_folder import open_disk, require_room
from shardwise.memory.disk_memory import DiskMemory
from shardwise.memory.disk_reads import DiskRead
from shardwise.memory.disk_rows import DiskRows
from shardwise.memory.dtypes import torch_dtype
from shardwise.memory.factors import Factors, KeptFactors
from shardwise.memory.flat import ABSENT, ANCHOR, GATHERING, MOMENTUM, READY, Flat, FullState
from shardwise.memory.flat_gradients import FlatGradients
from shardwise.memory.fresh import FreshGradients, place
from shardwise.memory.host_memory import Copied, Copy, HostMemory
from shardwise.memory.memory_kind import is_dense, on_host
from shardwise.memory.select import UnitChoice, choose_units, whole_numel
from shardwise.memory.shared_elements import agrees, copy_into, may_overlap
from shardwise.memory.shared_rest import share
from shardwise.memory.tables import LabelledTable, fits, in_own_precision, owners_of, tables_for, unit_numel
from shardwise.memory.unit import Unit, make_units, unit_specs

__all__ = [
    "ABSENT",
    "ANCHOR",
    "GATHERING",
    "MOMENTUM",
    "READY",
    "AtRest",
    "CodedRows",
    "Copied",
    "Copy",
    "DiskMemory",
    "DiskRead",
    "DiskRows",
    "Factors",
    "Flat",
    "FlatGradients",
    "FreshGradients",
    "FullState",
    "HostMemory",
    "KeptFactors",
    "LabelledTable",
    "Rows",
    "Unit",
    "UnitChoice",
    "agrees",
    "choose_units",
    "copy_into",
    "fits",
    "in_own_precision",
    "is_at_rest",
    "is_dense",
    "make_units",
    "may_overlap",
    "on_host",
    "open_disk",
    "owners_of",
    "part_of",
    "place",
    "put_part",
    "require_room",
    "share",
    "tables_for",
    "torch_dtype",
    "unit_numel",
    "unit_specs",
    "whole_numel",
]
