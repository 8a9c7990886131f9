"""The schemes that users ask for by name. A new one is a line here and a golden text in `tests/golden`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.errors import ConfigError, PlacementError, nearest
from shardwise.plan import PlaceEdit, Plan, Rows, Rule, WireFormat
from shardwise.plan.mesh import ISLAND_AXIS, Mesh
from shardwise.plan.other_names import hint_for_preset
from shardwise.plan.placement.low_rank import LowRank
from shardwise.plan.placement.place import WIDTH, Axes, Dtype, Kind, Place
from shardwise.plan.placement.table import Outer, Table, narrows
from shardwise.plan.placement.wire import Codes, Feedback, Wire


@dataclass(frozen=True)
class Preset:
    """A table without dtypes, and where the idea comes from."""

    axes: Axes
    param: Place
    held: Place
    grad: Place
    optim: Place
    known_from: str

    def over(self, mesh: Mesh) -> Preset:
        """The preset on the axes of `mesh`: one written for a single axis takes all replica axes of the mesh."""
        if self.axes != DP:
            mesh.require(self.axes, "This preset")
            return self

        def spread(place: Place) -> Place:
            axes = mesh.replica_axes
            return replace(place, shard=axes if place.shard else (), partial=axes if place.partial else ())

        return Preset(
            mesh.replica_axes,
            spread(self.param),
            spread(self.held),
            spread(self.grad),
            spread(self.optim),
            self.known_from,
        )


NODE = "node"
"""The axis between hosts."""
_BLOCKS = {"int8": 256, "int4": 128, "fp8": 256}
"""Elements of one scale by default: a scale adds 0.8 % to int8 and fp8, and 3.1 % to int4."""
DP, TWO = ("dp",), (NODE, "local")
COPY, SHARD, PARTIAL = Place(), Place(shard=DP), Place(partial=DP)
LOCAL, BOTH = Place(shard=("local",)), Place(shard=TWO)
HOST, DISK = Place(shard=DP, tier="host"), Place(shard=DP, tier="disk")

PRESETS = {
    #                    axes  param  held   grad     optim
    "ddp": Preset(DP, COPY, COPY, COPY, COPY, "PyTorch DDP (arXiv:2006.15704), Horovod (arXiv:1802.05799)"),
    "zero1": Preset(DP, COPY, COPY, PARTIAL, SHARD, "ZeRO stage 1 (arXiv:1910.02054)"),
    "zero2": Preset(DP, COPY, COPY, SHARD, SHARD, "ZeRO stage 2 (arXiv:1910.02054)"),
    "zero3": Preset(DP, SHARD, SHARD, SHARD, SHARD, "ZeRO stage 3 (arXiv:1910.02054), FSDP (arXiv:2304.11277)"),
    "zero3-kept": Preset(DP, SHARD, COPY, SHARD, SHARD, "FSDP with reshard_after_forward=False"),
    "hsdp": Preset(TWO, LOCAL, LOCAL, LOCAL, LOCAL, "FSDP hybrid sharding, MiCS (arXiv:2205.00119)"),
    "hpz": Preset(TWO, BOTH, LOCAL, BOTH, BOTH, "ZeRO++ secondary shard (arXiv:2306.10209)"),
    "offload": Preset(DP, COPY, COPY, HOST, HOST, "ZeRO-Offload (arXiv:2101.06840): ZeRO stage 2, updated on the host"),
    "zero3-offload": Preset(DP, SHARD, SHARD, HOST, HOST, "ZeRO stage 3 with offload_optimizer, updated on the host"),
    # Parameters stay off the disk unless a row or a budget says so. With Adam in bf16 a step moves 24 bytes for each
    # parameter's states and master weight; parameters there would add 4, and 4 more for each micro-batch.
    "infinity": Preset(DP, SHARD, SHARD, HOST, DISK, "ZeRO-Infinity (arXiv:2104.07857): zero3-offload, states on disk"),
}


def preset(name: str) -> Preset:
    """The preset called `name`. Raises `PlacementError` with the nearest name if there is none."""
    if name == "auto":
        raise ConfigError(
            "preset: auto has no table yet: sw.shard(model, 'auto', batch=...) settles it for one micro-batch, or "
            "`shardwise plan` before a job. Name a preset: zero3, or any of `shardwise explain --list`."
        )
    if name not in PRESETS:
        raise PlacementError(f"There is no preset {name!r}. {hint_for_preset(name, (*PRESETS, 'auto'))}")
    return PRESETS[name]


def takes_local_size(plan: Plan) -> bool:
    """Whether the mesh of `plan` depends on the number of ranks per host."""
    return plan.mesh is None and plan.preset in PRESETS and len(PRESETS[plan.preset].axes) > 1


def mesh_for(plan: Plan, world_size: int, local_size: int | None = None) -> Mesh:
    """The mesh that `plan` asks for, over `world_size` ranks, `local_size` of them on each host (default: all).

    Without a mesh in the plan a one-axis preset takes all ranks, and a two-axis preset takes the ranks of a host as its
    inner axis. Raises `ConfigError` for a mesh that this world cannot have.
    """
    axes = preset(plan.preset).axes
    if plan.mesh is None and len(axes) > 1:
        local = world_size if local_size is None else local_size
        if local < 1 or world_size % local:
            why = f"but {local} does not divide the world's {world_size}" if local else "which is not set"
            raise ConfigError(
                f"Preset {plan.preset!r} without a mesh takes the ranks of one host for its axis {axes[-1]!r}: "
                f"LOCAL_WORLD_SIZE, {why}. Give the plan a mesh, such as "
                f"{{{axes[0]}: {world_size}, {axes[-1]}: 1}}."
            )
        return Mesh.of({axes[0]: -1, **dict.fromkeys(axes[1:-1], 1), axes[-1]: local}, world_size)
    sizes = plan.mesh or {axes[-1]: -1}
    return Mesh.of(sizes, world_size)


def table_for(plan: Plan, mesh: Mesh, rule: Rule | None = None, *, what: str = "Row") -> Table:
    """The table that `plan` asks for on `mesh`: the preset's rows, the plan's edits and dtypes, then the rule's.

    Parameters rest and are held in the compute dtype (`precision`); gradients at rest and optimizer states in at least
    fp32, so that sums over micro-batches and small updates are not rounded away.
    """
    base, compute = preset(plan.preset).over(mesh), _computes_in(plan, rule)
    edits = [rows for rows in (plan.rows, rule.rows if rule is not None else None) if rows]
    param, held, grad, optim = _rows_for(base, edits, mesh, compute, what)
    outer = None
    if ISLAND_AXIS in mesh.axes:
        param, held, grad, optim = (replace(one, varying=(ISLAND_AXIS,)) for one in (param, held, grad, optim))
        outer = _outer(plan, optim)
    _check_tiers(param, held, grad, optim, what)
    param_wire, param_codes = _wires(plan.wire.param, "param", mesh)
    frozen_codes = _stored_codes(plan, mesh, compute) or _frozen_codes(plan, mesh)
    grad_wire, grad_codes = _wires(plan.wire.grad, "grad", mesh)
    if rule is None:
        _check_rests(compute, param=param_codes, frozen=frozen_codes, grad=grad_codes)
    if plan.wire.feedback.beta is not None:
        grad_codes = _with_feedback(grad_codes, plan)
    if rule is None:  # not of a rule: nobody asks that its parameters be sent, the plan does
        _check_params_are_sent(plan, param_codes or param_wire, frozen_codes, param.shard, optim.shard)
    table = Table(
        axes=mesh.replica_axes,
        param=param,
        held=held,
        grad=grad,
        optim=optim,
        compute=compute,
        grad_wire=grad_wire or Wire(compute),
        param_wire=param_wire,
        grad_codes=grad_codes,
        param_codes=param_codes,
        frozen_codes=frozen_codes,
        step="device" if optim.tier == "device" else "host",
        outer=outer,
    )
    return table if plan.powersgd.rank is None else _with_factors(table, plan, mesh)


def _computes_in(plan: Plan, rule: Rule | None) -> Dtype:
    """The dtype of forward and backward."""
    asked = (rule.precision if rule is not None else None) or plan.precision
    if asked == "auto":
        raise PlacementError(
            "precision auto has no table yet: sw.shard settles it, by what the devices of all ranks are fast at. Name "
            "one: bf16 or fp32."
        )
    return asked


def _rows_for(
    base: Preset, edits: Sequence[Rows], mesh: Mesh, compute: Dtype, what: str
) -> tuple[Place, Place, Place, Place]:
    """The rows `param`, `held`, `grad` and `optim`, after `edits`. `what` begins an error about one of them."""
    states: Dtype = compute if WIDTH[compute] >= WIDTH["fp32"] else "fp32"

    def row(kind: Kind, place: Place, dtype: Dtype) -> Place:
        edited = replace(place, **{"dtype": dtype, **_edits_of(kind, edits)})
        mesh.require(edited.shard + edited.partial, f"{what} {kind!r}")
        if edited.tier == "disk" and kind == "grad":
            raise PlacementError(
                f"{what} 'grad' is placed on tier 'disk', where parameters and optimizer states can be. Make "
                f"rows.grad.tier host, or leave it out."
            )
        if kind in ("param", "held") and edited.dtype != compute:
            raise PlacementError(
                f"{what} {kind!r} is {edited.dtype}, but forward and backward run in {compute}. "
                f"Set precision={edited.dtype}, or leave out rows.{kind}.dtype."
            )
        return replace(edited, shard=_in_order(edited.shard, mesh), partial=_in_order(edited.partial, mesh))

    param, held = row("param", base.param, compute), row("held", base.held, compute)
    # What is held is what rests, wherever that is.
    if held.shard == param.shard and "tier" not in _edits_of("held", edits):
        held = replace(held, tier=param.tier)
    return param, held, row("grad", base.grad, states), row("optim", base.optim, states)


def _with_factors(table: Table, plan: Plan, mesh: Mesh) -> Table:
    """`table` with gradients of matrices sent as factors, or still to be sent so."""
    asked = plan.powersgd
    assert asked.rank is not None
    split = [axis for axis in mesh.axes_of_island if mesh.size(axis) > 1]
    if len(split) > 1 or mesh.has_experts or any(axis not in mesh.data_axes for axis in split):
        raise PlacementError(
            f"powersgd.rank is {asked.rank}, and the mesh is {mesh}. Gradients are sent as factors along a single axis "
            f"of data parallelism. Give the plan a mesh such as {{dp: {mesh.world_size}}}, or leave powersgd out."
        )
    if plan.precision == "fp16":
        raise PlacementError(
            f"powersgd.rank is {asked.rank}, and precision is fp16, whose loss scale changes: what a rank has not sent "
            f"would be added to gradients of another scale. Set precision to bf16, or leave powersgd out."
        )
    if plan.wire.grad.dtype is not None:
        raise PlacementError(
            f"powersgd.rank is {asked.rank}, and wire.grad is {plan.wire.grad.dtype}. Factors are sent in fp32, and "
            f"what is not sent as factors with them. Leave out one of both."
        )
    return table.with_low_rank(LowRank(asked.rank, asked.min_rate, asked.seed, has_begun=asked.start_step == 0))


def _outer(plan: Plan, optim: Place) -> Outer:
    """The common model of islands: a rank has the elements that it updates."""
    from shardwise.plan.placement.fragment import fragments_of  # only plans with islands load it

    asked, wire, codes = plan.islands, Wire(optim.dtype), None
    if asked.wire.axes is not None:
        raise PlacementError("islands.wire has axes, and outer gradients are sent along one. Leave out axes.")
    if asked.wire.dtype == "int8" or asked.wire.dtype == "int4":
        codes = Codes(asked.wire.dtype, asked.wire.block or _BLOCKS[asked.wire.dtype], (ISLAND_AXIS,))
        wire = wire if asked.wire.rest is None else Wire(asked.wire.rest)
    elif asked.wire.dtype == "fp8":
        raise PlacementError("islands.wire is fp8, in which parameters are sent. Send outer gradients as int8 or int4.")
    elif key := next((key for key in ("block", "rest") if getattr(asked.wire, key) is not None), None):
        raise PlacementError(f"islands.wire has a {key}, which is for int8 and int4. Leave it out, or choose one.")
    elif asked.wire.dtype is not None:
        wire = Wire(asked.wire.dtype)
    if WIDTH[wire.dtype] > WIDTH[optim.dtype] or (codes is not None and optim.dtype != "fp32"):
        raise PlacementError(
            f"islands.wire is {codes or wire}, and master weights are {optim.dtype}: sending would take more for "
            f"nothing, or cannot be scaled. Leave it out: outer gradients are then sent as they are."
        )
    place = Place(shard=optim.shard, tier=asked.tier, dtype=optim.dtype)
    return Outer(place, int(asked.optimizer.momentum > 0), fragments_of(asked), wire, codes)


def _wires(asked: WireFormat, kind: str, mesh: Mesh) -> tuple[Wire | None, Codes | None]:
    """The plain wire that a plan asks for, and its codes with the axes along which they are sent.

    Codes are worth their time where messages leave a host: along `node`, where the mesh has that axis. Of other axes
    nothing is known, so that parameters are sent as codes along all, and gradients along the outermost: see [Note: sums
    are not made codes].
    """
    if asked.dtype != "int8" and asked.dtype != "int4" and asked.dtype != "fp8":
        if key := next((key for key in ("block", "axes", "rest") if getattr(asked, key) is not None), None):
            raise PlacementError(
                f"wire.{kind}.{key} is given, but wire.{kind}.dtype is {asked.dtype or 'not'}: only int8, int4 and fp8 "
                f"are sent in blocks, along some axes and beside a rest. Leave out {key}, or choose one of these."
            )
        return (None if asked.dtype is None else Wire(asked.dtype)), None
    axes: Axes = mesh.replica_axes
    is_default = asked.axes is None
    if is_default and NODE in axes:
        axes = (NODE,)
    elif asked.axes is not None and asked.axes != "everywhere":
        mesh.require(asked.axes, f"wire.{kind}.axes")
        if others := [axis for axis in asked.axes if axis not in axes]:
            raise PlacementError(
                f"wire.{kind}.axes names {others[0]}, along which ranks hold different parameters, so none are sent. "
                f"{nearest(others[0], axes)}"
            )
        axes = _in_order(asked.axes, mesh)
    rest = None if asked.rest is None else Wire(asked.rest)
    once = kind == "grad" and is_default
    return None, Codes(asked.dtype, asked.block or _BLOCKS[asked.dtype], axes, rest=rest, only_outermost=once)


def _with_feedback(codes: Codes | None, plan: Plan) -> Codes:
    """The codes of gradients, with the plan's error feedback."""
    beta, reset = plan.wire.feedback.beta, plan.wire.feedback.reset
    assert beta is not None
    if codes is None:
        raise PlacementError(
            f"wire.feedback is {beta:g}, but wire.grad.dtype is {plan.wire.grad.dtype or 'not given'}: only of "
            f"int8, int4 and fp8 is fed back what they lose. Leave out feedback, or choose one of these."
        )
    if plan.precision == "fp16":
        raise PlacementError(
            f"wire.feedback is {beta:g}, and precision is fp16, whose loss scale changes: what codes have lost "
            f"would be added to gradients of another scale. Set precision to bf16, or leave out feedback."
        )
    return replace(codes, feedback=Feedback(beta, reset))


def _frozen_codes(plan: Plan, mesh: Mesh) -> Codes | None:
    """What frozen parameters are sent as, if that is not what others are."""
    plain, codes = _wires(plan.wire.frozen, "frozen", mesh)
    if plain is not None:
        raise PlacementError(
            f"wire.frozen is {plain}, and frozen parameters are sent as they are or as codes. Choose int8, int4 or "
            f"fp8, or leave it out."
        )
    return codes


def _stored_codes(plan: Plan, mesh: Mesh, compute: Dtype) -> Codes | None:
    """The codes as which frozen parameters rest, and are sent."""
    asked, sent = plan.storage.frozen, plan.wire.frozen
    if asked.dtype is None:
        if asked.block is not None:
            raise PlacementError("storage.frozen.block is given, but no dtype. Choose int8, int4 or fp8.")
        return None
    if sent != WireFormat():
        raise PlacementError(
            f"storage.frozen is {asked.dtype}, and wire.frozen {sent.dtype}. What rests as codes is sent as these, so "
            f"leave out wire.frozen."
        )
    if compute == "fp64":
        raise PlacementError(
            f"storage.frozen is {asked.dtype}, whose scales are those of fp32 numbers, but the precision is fp64: that "
            f"of the plan, or without one that of some parameters. Set precision: fp32, or leave it out: frozen "
            f"parameters then rest as they are."
        )
    return Codes(asked.dtype, asked.block or _BLOCKS[asked.dtype], mesh.replica_axes, rests=True)


def _check_rests(compute: Dtype, **codes: Codes | None) -> None:
    for kind, one in codes.items():
        if one is not None and one.rest is not None and not narrows(one.rest, compute):
            raise PlacementError(
                f"wire.{kind}.rest is {one.rest}, which is not narrower than {compute}, the precision, so sending "
                f"would gain nothing. Leave it out: what is not made codes is then sent as it is."
            )


def _check_params_are_sent(
    plan: Plan, wire: Wire | Codes | None, frozen: Codes | None, param: Axes, optim: Axes
) -> None:
    """Raise `PlacementError` for a format of parameters that none are sent in. `param` and `optim` are the axes over
    which these rows are sharded."""
    if isinstance(wire, Codes) and (param or optim):
        _check_codes_are_sent("param", wire, optim, plan)
    if frozen is not None and not frozen.rests:
        _check_codes_are_sent("frozen", frozen, param, plan)
    if wire is not None and not (param or optim):
        raise PlacementError(
            f"wire.param is {wire}, but with {plan.preset} every rank has and updates all parameters, so none are "
            f"sent. Leave it out, or choose a preset that shards parameters or states, such as zero1 or zero3."
        )


def _check_codes_are_sent(kind: str, codes: Codes, shard: Axes, plan: Plan) -> None:
    what = f"wire.{kind} is {codes} along {'+'.join(codes.axes)}, but with {plan.preset}"
    if not shard:
        raise PlacementError(
            f"{what} every rank has all frozen parameters, so none are sent. Leave it out, or choose a preset that "
            f"shards parameters, such as zero3."
        )
    if not set(codes.axes) & set(shard):
        raise PlacementError(
            f"{what} parameters are sent along {'+'.join(shard)} only. Leave it out, or name one of these in "
            f"wire.{kind}.axes."
        )


def _edits_of(kind: Kind, rows: Sequence[Rows]) -> dict[str, Any]:
    """The edits that a plan and a rule make to one row; the rule's win."""
    edits = [getattr(one, kind) for one in rows]
    return {key: value for edit in edits for key, value in edit if value is not None}


def _check_tiers(param: Place, held: Place, grad: Place, optim: Place, what: str) -> None:
    """Raise `PlacementError` for combinations of rows on lower tiers that are not supported."""
    if param.tier == "disk" and (optim.tier, optim.shard) != ("disk", param.shard):
        raise PlacementError(
            f"{what} 'param' rests on the disk as {_describe(param)} and 'optim' on the {optim.tier} as "
            f"{_describe(optim)}, but updated parameters are written in one piece with their states. Set "
            f"rows.optim.tier=disk and give both rows the same shard, or make rows.param.tier host."
        )
    if grad.tier == "host" and grad.partial:
        raise PlacementError(
            f"{what} 'grad' waits on the host as summands over {'+'.join(grad.partial)}, and sums are taken on the "
            f"device. Shard it over that axis, or leave out rows.grad.tier."
        )
    for kind, place in (("param", param), ("grad", grad)):
        if place.tier == "host" and optim.tier == "device":
            raise PlacementError(
                f"{what} {kind!r} is on the host and 'optim' on the device, but the update is done where the states "
                f"are. Set rows.optim.tier=host too."
            )
    if grad.tier == "host" and (grad.shard, grad.dtype) != (optim.shard, optim.dtype):
        raise PlacementError(
            f"{what} 'grad' waits on the host as {_describe(grad)}, but the update needs {_describe(optim)} there, and "
            f"nothing is cut or cast on the way. Give both rows the same shard and dtype, or leave out rows.grad.tier."
        )
    if held.tier != "device" and (param.tier, param.shard) != (held.tier, held.shard):
        raise PlacementError(
            f"{what} 'held' is on the {held.tier}, but only parameters that rest there can be held "
            f"there. Give rows.param the same place, or leave out rows.held.tier."
        )


def _describe(place: Place) -> str:
    return f"shard({'+'.join(place.shard)}) in {place.dtype}" if place.shard else f"copy in {place.dtype}"


def ruled_tables(plan: Plan, mesh: Mesh) -> dict[str, Table]:
    """The tables of the plan's rules by rule name, for the rules that have rows."""
    return {
        name: table_for(plan, mesh, rule, what=f"Rule {name!r}: row")
        for name, rule in plan.rules.items()
        if rule.has_rows
    }


def resident_table(plan: Plan, mesh: Mesh) -> Table:
    """The plan's table for parameters that are too small to be worth gathering (`resident_below`)."""
    whole = PlaceEdit(shard=(), tier="device")
    return table_for(plan, mesh, Rule(rows=Rows(param=whole, held=whole)), what="resident_below: row")


def _in_order(axes: Axes, mesh: Mesh) -> Axes:
    """The axes in the order of the mesh; the order in which a plan names them has no meaning."""
    return tuple(sorted(axes, key=mesh.axes.index))
