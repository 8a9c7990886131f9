"""Units chosen from a module tree, and the flat memory they live in."""

from shardwise.storage.at_rest import AtRest, is_at_rest
from shardwise.storage.boxes import part_of, put_part
from shardwise.storage.disk_folder import open_disk, require_room
from shardwise.storage.disk_memory import DiskMemory, DiskRows
from shardwise.storage.disk_reads import DiskRead
from shardwise.storage.dtypes import torch_dtype
from shardwise.storage.flat import ABSENT, GATHERING, READY, Flat, FullState, let_go
from shardwise.storage.fresh import FreshGradients
from shardwise.storage.gradients import FlatGradients
from shardwise.storage.host_memory import Copied, Copy, HostMemory
from shardwise.storage.memory import is_dense, on_host
from shardwise.storage.overlap import agrees, copy_into, may_overlap
from shardwise.storage.select import UnitChoice, choose_units, whole_numel
from shardwise.storage.shared import share
from shardwise.storage.tables import LabelledTable, fits, in_own_precision, owners_of, tables_for, unit_numel
from shardwise.storage.unit import Unit, make_unit, unit_specs

__all__ = [
    "ABSENT",
    "GATHERING",
    "READY",
    "AtRest",
    "Copied",
    "Copy",
    "DiskMemory",
    "DiskRead",
    "DiskRows",
    "Flat",
    "FlatGradients",
    "FreshGradients",
    "FullState",
    "HostMemory",
    "LabelledTable",
    "Unit",
    "UnitChoice",
    "agrees",
    "choose_units",
    "copy_into",
    "fits",
    "in_own_precision",
    "is_at_rest",
    "is_dense",
    "let_go",
    "make_unit",
    "may_overlap",
    "on_host",
    "open_disk",
    "owners_of",
    "part_of",
    "put_part",
    "require_room",
    "share",
    "tables_for",
    "torch_dtype",
    "unit_numel",
    "unit_specs",
    "whole_numel",
]
