"""The whole configuration on one screen.

Strict: an unknown key, a wrong type or a value out of range is an error, never a silent default.
What a name means (is `zero4` a preset? is `dp` an axis of this mesh?) is asked one floor up, in
`placement`, which owns those words.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr

from shardwise.units import parse_bytes

DtypeName = Literal["fp64", "fp32", "bf16"]
TierName = Literal["device", "host", "disk"]


def _bytes(value: object) -> object:
    return parse_bytes(value) if isinstance(value, str) and value != "auto" else value


def _axes(value: object) -> object:
    """YAML and JSON have lists; the table is frozen and keeps tuples."""
    return tuple(value) if isinstance(value, list) else value


Bytes = Annotated[int, BeforeValidator(_bytes), Field(ge=0)]
Axes = Annotated[tuple[str, ...], BeforeValidator(_axes)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class PlaceEdit(Strict):
    """A change to one row of the preset's table. What is not given stays as the preset has it."""

    shard: Axes | None = Field(None, description="mesh axes the row is split over; [] for a full copy")
    partial: Axes | None = Field(None, description="mesh axes it is a summand over; only for grad")
    tier: TierName | None = Field(None, description="where the bytes lie")
    dtype: DtypeName | None = Field(None, description="what the bytes are")


class Rows(Strict):
    """Changes to the preset's table, row by row."""

    param: PlaceEdit = Field(PlaceEdit(), description="parameters, between steps")
    held: PlaceEdit = Field(PlaceEdit(), description="parameters, between their forward and their backward")
    grad: PlaceEdit = Field(PlaceEdit(), description="gradients, while they wait for the step")
    optim: PlaceEdit = Field(PlaceEdit(), description="optimizer states and master weights")


class Wire(Strict):
    """What travels. Sums are taken in the wider of the wire's and the row's dtype."""

    grad: DtypeName | None = Field(None, description="dtype of gradients on the wire; default: precision")


class Plan(Strict):
    """How one model is trained: a table, a mesh, and how the table is turned into a list."""

    preset: str = Field("zero3", description="the table to start from; see `shardwise explain --list`")
    mesh: dict[str, int] | None = Field(
        None, description="axis sizes, outermost first; one may be -1 (the rest); default: the preset's axes"
    )
    precision: DtypeName = Field("fp32", description="dtype of parameters in forward and backward")
    rows: Rows = Field(Rows(), description="changes to the preset's table")
    wire: Wire = Field(Wire(), description="what travels")
    units: Literal["auto"] | Axes | dict[Literal["class", "min_numel"], str | int] = Field(
        "auto",
        description="what is gathered together: auto (the repeated block class), a list of module names "
        "(h.*), {class: Block}, or {min_numel: 1000000}",
    )
    prefetch_bytes: Literal["auto"] | Bytes = Field(
        "auto", description="how far gathers may run ahead; auto: the largest unit; 0: not at all"
    )
    accumulate: int = Field(1, ge=1, description="micro-batches per optimizer step")
    clip_grad_norm: float | None = Field(None, gt=0, description="largest global 2-norm of the gradient")
    sync_buffers: bool = Field(True, description="after each step all ranks take rank 0's changed buffers")

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    def origin(self, path: str) -> str:
        """Where the value at `path` (`"wire.grad"`) came from: a file and line, an override, or the default."""
        return self._origins.get(path, "default")
