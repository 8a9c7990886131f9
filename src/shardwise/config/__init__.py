"""The configuration: strict, and every value remembers where it came from."""

from shardwise.config.describe import plan_table, schema_table
from shardwise.config.formats import flatten
from shardwise.config.load import PlanSource, load_plan
from shardwise.config.schema import (
    Activations,
    Budget,
    DtypeName,
    LossScale,
    Offload,
    PlaceEdit,
    Plan,
    PolicyName,
    Profile,
    Rows,
    Rule,
    StyleName,
    TensorParallel,
    Wire,
)

__all__ = [
    "Activations",
    "Budget",
    "DtypeName",
    "LossScale",
    "Offload",
    "PlaceEdit",
    "Plan",
    "PlanSource",
    "PolicyName",
    "Profile",
    "Rows",
    "Rule",
    "StyleName",
    "TensorParallel",
    "Wire",
    "flatten",
    "load_plan",
    "plan_table",
    "schema_table",
]
