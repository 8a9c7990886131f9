"""The configuration: strict, and every value remembers where it came from."""

from shardwise.plan.describe import plan_table, schema_table
from shardwise.plan.files.formats import flatten
from shardwise.plan.load import PlanSource, load_plan
from shardwise.plan.schema import (
    Activations,
    Budget,
    DtypeName,
    Fp8,
    LossScale,
    Offload,
    Pipeline,
    PlaceEdit,
    Plan,
    PolicyName,
    PowerSGD,
    PrecisionName,
    Profile,
    Rows,
    Rule,
    StyleName,
    TensorParallel,
    Wire,
    WireFormat,
)

__all__ = [
    "Activations",
    "Budget",
    "DtypeName",
    "Fp8",
    "LossScale",
    "Offload",
    "Pipeline",
    "PlaceEdit",
    "Plan",
    "PlanSource",
    "PolicyName",
    "PowerSGD",
    "PrecisionName",
    "Profile",
    "Rows",
    "Rule",
    "StyleName",
    "TensorParallel",
    "Wire",
    "WireFormat",
    "flatten",
    "load_plan",
    "plan_table",
    "schema_table",
]
