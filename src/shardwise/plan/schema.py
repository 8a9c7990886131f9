"""The whole configuration on one screen.

Strict: an unknown key, a wrong type or a value out of range is an error, never a silent default. Whether a name exists
(is `zero4` a preset? is `dp` an axis of this mesh?) is checked one layer up, in `placement`.
"""

# No annotations as text: pydantic would compile and evaluate 190 of them, in 5 of 270 ms of `import shardwise`.
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from shardwise.errors import ConfigError
from shardwise.plan.files.formats import flatten
from shardwise.plan.validation_messages import as_config_error
from shardwise.plan.words import unknown_at
from shardwise.system.units import parse_bytes

DtypeName = Literal["fp64", "fp32", "bf16", "fp16"]
PrecisionName = Literal[DtypeName, "auto"]
TierName = Literal["device", "host", "disk"]
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zb-h1"]
Fp8RecipeName = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"]
PolicyName = Literal["keep", "recompute", "selective", "offload", "disk"]


def _bytes(value: object) -> object:
    return parse_bytes(value) if isinstance(value, str) and value != "auto" else value


def _names(value: object) -> object:
    """Lists, as YAML and JSON have them, become tuples, because the models are frozen."""
    return tuple(value) if isinstance(value, list) else value


def _nested(value: object) -> object:
    return tuple(map(_names, value)) if isinstance(value, list | tuple) else value


def _one_rule(rule: dict[str, str | int]) -> dict[str, str | int]:
    counts = [rule.get(key, 1) for key in ("min_numel", "together")]
    is_either = ("class" in rule) != ("min_numel" in rule) and isinstance(rule.get("class", ""), str)
    if is_either and all(isinstance(count, int) and count >= 1 for count in counts):
        return rule
    raise ValueError(
        "a rule is {class: name} or {min_numel: count}; {together: count} puts several modules into one unit"
    )


# The inner descriptions name the type in error messages and in the schema's table.
Bytes = Annotated[int, BeforeValidator(_bytes), Field(ge=0, description="bytes such as 64M or 4096")]
Stages = Annotated[tuple[tuple[str, ...], ...], BeforeValidator(_nested), Field(description="a list of lists of names")]
Names = Annotated[tuple[str, ...], BeforeValidator(_names), Field(description="a list of names")]
UnitRule = Annotated[
    dict[Literal["class", "min_numel", "together"], str | int],
    AfterValidator(_one_rule),
    Field(description="a rule such as {class: Block}"),
]


StyleName = Literal[
    "column",
    "column_gathered",
    "row",
    "row_scattered",
    "vocabulary",
    "vocabulary_cut",
    "embedding_column",
    "embedding_heads",
    "mla_kv_a_proj",
    "summed",
    "replicated",
]
"""Ways to split a module; see docs/tensor-parallel.md."""


def _one_tensor_rule(rule: dict[str, str | int]) -> dict[str, str | int]:
    counts = [rule.get(key, 1) for key in ("parts", "heads")]
    if rule.get("style") in get_args(StyleName) and all(type(count) is int and count >= 1 for count in counts):
        return rule
    raise ValueError(
        f"a rule is {{style: name}}, with one of {', '.join(get_args(StyleName))}; {{parts: count}} says how many "
        "matrices are fused in the module, {heads: count} how many attention heads each has"
    )


TensorRule = Annotated[
    dict[Literal["style", "parts", "heads"], str | int],
    AfterValidator(_one_tensor_rule),
    Field(description="a rule {style: ..., parts: 3}"),
]


Style = Annotated[StyleName, Field(description="a style")]


TrackerName = Literal["jsonl", "csv", "tensorboard", "wandb", "mlflow", "comet", "trackio"]
"""Where `engine.log` can send its values; see docs/seeing.md."""


def _by_name(value: object) -> object:
    """`[jsonl, tensorboard]` becomes `{jsonl: {}, tensorboard: {}}`; an entry may be a name with options."""
    if not isinstance(value, list | tuple):
        return value
    named: dict[object, object] = {}
    for one in value:
        if not isinstance(one, Mapping | str):
            return value  # it is refused as it was written
        named.update(one if isinstance(one, Mapping) else {one: {}})
    return named


def _in_order(window: tuple[int, int]) -> tuple[int, int]:
    if 1 <= window[0] <= window[1]:
        return window
    raise ValueError(f"steps {list(window)} are no window: write the first and the last step, such as [10, 12]")


Trackers = Annotated[
    dict[TrackerName, dict[str, Any]],
    BeforeValidator(_by_name),
    Field(description=f"a list of {', '.join(get_args(TrackerName))}, each a name or {{name: options}}"),
]
StepWindow = Annotated[
    tuple[int, int],
    BeforeValidator(_names),
    AfterValidator(_in_order),
    Field(description="the first and the last step, such as [10, 12]"),
]


if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)  # it has no public name


class _InOurWords(ModelMetaclass):
    """Makes `Plan(stagee=3)` raise what a file with that key does, not pydantic's `ValidationError`."""

    def __call__(cls, *args: Any, **values: Any) -> Any:  # noqa: N805  # the first argument is a class
        try:
            return super().__call__(*args, **values)
        except ValidationError as error:
            root: Any = cls
            raise as_config_error(error, values, root=root, name=cls.__name__) from None


class Strict(BaseModel, metaclass=_InOurWords):
    """What all sections are. Made in Python, they raise `ConfigError` for unknown keys and wrong values."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    shorthand: ClassVar[str] = ""
    """What may be written in the place of a section, in words: the value of its first field alone."""
    stands_for_first: ClassVar[tuple[type, ...]] = ()
    """The types of such values; whatever else stands there is checked as a section."""

    @model_validator(mode="before")
    @classmethod
    def _written_out(cls, value: object) -> object:
        return {next(iter(cls.model_fields)): value} if isinstance(value, cls.stands_for_first) else value


class PlaceEdit(Strict):
    """A change to one row of the preset's table. Fields that are not given keep the preset's value."""

    shard: Names | None = Field(default=None, description="mesh axes over which the row is sharded; [] for a full copy")
    partial: Names | None = Field(default=None, description="mesh axes whose ranks hold partial sums; only for grad")
    tier: TierName | None = Field(default=None, description="where it is stored")
    dtype: DtypeName | None = Field(default=None, description="its dtype")


class Rows(Strict):
    """Changes to the preset's table, row by row."""

    param: PlaceEdit = Field(default=PlaceEdit(), description="parameters, between steps")
    held: PlaceEdit = Field(default=PlaceEdit(), description="parameters, between their forward and backward")
    grad: PlaceEdit = Field(default=PlaceEdit(), description="gradients, while they wait for the step")
    optim: PlaceEdit = Field(default=PlaceEdit(), description="optimizer states and master weights")


class WireFormat(Strict):
    """How elements are sent. The name of a dtype alone is enough."""

    shorthand: ClassVar[str] = "the name of a dtype"
    stands_for_first: ClassVar[tuple[type, ...]] = (str, type(None))
    dtype: Literal[DtypeName, "int8", "int4", "fp8"] | None = Field(
        default=None,
        description="a dtype to which they are rounded, or codes with a scale for each block; see docs/plans.md",
    )
    block: Literal[16, 32, 64, 128, 256, 512, 1024, 2048, 4096] | None = Field(
        default=None, description="elements of one scale; default: 256 of int8 and fp8, 128 of int4"
    )
    axes: Literal["everywhere"] | Names | None = Field(
        default=None,
        description="mesh axes along which codes are sent; everywhere: all; default: node, if the mesh has it, "
        "else all",
    )
    rest: DtypeName | None = Field(
        default=None,
        description="beside codes: dtype in which vectors, embeddings and routers are sent; default: as without codes",
    )


class Feedback(Strict):
    """Error feedback of gradients that are sent as codes (LoCo); see docs/between-hosts.md. A number is `beta`."""

    shorthand: ClassVar[str] = "a number from 0 to 1"
    stands_for_first: ClassVar[tuple[type, ...]] = (int, float)
    beta: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="share of the earlier average in what is kept of what codes lose, for later gradients; 0: only the "
        "last loss is kept; default: nothing is kept",
    )
    reset: int = Field(default=1024, ge=1, description="steps after which all that was kept is forgotten")


class Wire(Strict):
    """What is communicated. Sums are computed in the wider of the wire's and the row's dtype."""

    param: WireFormat = Field(
        default=WireFormat(),
        description="parameters, in a dtype narrower than precision: they are rounded to it wherever they are "
        "gathered, and master weights are not; default: sent as they are",
    )
    frozen: WireFormat = Field(
        default=WireFormat(), description="frozen parameters, as codes; default: as others (param)"
    )
    grad: WireFormat = Field(default=WireFormat(), description="gradients; default: in precision")
    feedback: Feedback = Field(default=Feedback(), description="error feedback of gradients that are sent as codes")


class StorageFormat(Strict):
    """How elements are kept. The name of a dtype alone is enough."""

    shorthand: ClassVar[str] = "int8, int4 or fp8"
    stands_for_first: ClassVar[tuple[type, ...]] = (str, type(None))
    dtype: Literal["int8", "int4", "fp8"] | None = Field(
        default=None, description="codes with a scale for each block; default: as elements"
    )
    block: Literal[16, 32, 64, 128, 256, 512, 1024, 2048, 4096] | None = Field(
        default=None, description="elements of one scale; default: 256 of int8 and fp8, 128 of int4"
    )


class Storage(Strict):
    """What lies in memory as codes between computations; see docs/between-hosts.md."""

    frozen: StorageFormat = Field(
        default=StorageFormat(), description="matrices of frozen parameters; they are also sent so"
    )


class PowerSGD(Strict):
    """Gradients of matrices sent as two thin factors each, for slow links; see docs/between-hosts.md. A number is
    `rank`."""

    shorthand: ClassVar[str] = "a whole number of at least 1"
    stands_for_first: ClassVar[tuple[type, ...]] = (int,)
    rank: int | None = Field(
        default=None, ge=1, description="columns of the factors; default: gradients are sent as they are"
    )
    start_step: int = Field(default=1000, ge=0, description="steps in which gradients are still sent as they are")
    min_rate: float = Field(
        default=2.0,
        gt=0,
        allow_inf_nan=False,
        description="a matrix is sent as factors if it has more than this many times their elements",
    )
    seed: int = Field(default=0, ge=0, description="of the first factors, which are random")


class Activations(Strict):
    """What happens to the tensors that a unit's forward saves for its backward. The name of a policy alone is
    enough."""

    shorthand: ClassVar[str] = "keep, recompute, selective, offload or disk"
    stands_for_first: ClassVar[tuple[type, ...]] = (str,)
    policy: PolicyName | None = Field(
        default=None,
        description="keep: in memory; recompute; selective: recompute all but the results in `keep`; offload: to the "
        "host; disk; default: keep",
    )
    every: int = Field(default=1, ge=1, description="apply it to every n-th unit, from the first; the others keep")
    keep: Names | None = Field(
        default=None,
        description="selective: operators whose results are kept, such as matmul, attention or aten.mm; default: the "
        "first two",
    )


class Rule(Strict):
    """Different rows for some of the parameters: those that match everything in the rule."""

    params: Names | None = Field(default=None, description="patterns of parameter names, such as *.bias")
    classes: Names | None = Field(default=None, description="classes of the modules that own them, such as LayerNorm")
    max_numel: int | None = Field(default=None, ge=1, description="elements: larger parameters do not match the rule")
    precision: DtypeName | None = Field(default=None, description="dtype in forward and backward; default: the plan's")
    rows: Rows = Field(default=Rows(), description="changes to the plan's table")
    activations: Activations = Field(default=Activations(), description="for units whose parameters all match the rule")

    @property
    def has_rows(self) -> bool:
        """Whether the rule changes tables, rather than activations only."""
        return self.activations.policy is None or self.precision is not None or self.rows != Rows()


class Sequence(Strict):
    """How ranks along `sp` share the tokens of a batch."""

    attention: Literal["auto", "ulysses", "ring"] = Field(
        default="auto",
        description="ulysses: all tokens of some heads on each rank; ring: keys and values circulate; auto: ulysses if "
        "heads divide",
    )


class Offload(Strict):
    """Which share of the model is kept off the device, in units: the last units first, because their gradients come
    first."""

    optim: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="share of the trained elements whose states, gradients and update are on the host",
    )
    optim_disk: float = Field(
        default=0.0, ge=0, le=1, description="share whose states are on a disk instead; at most that of optim"
    )
    param: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="share of all elements that rest on the host: frozen ones, and trained ones that are updated there",
    )
    param_disk: float = Field(
        default=0.0, ge=0, le=1, description="share of all elements that rest on the disk instead, beside their states"
    )


class Budget(Strict):
    """The memory available; the plan puts as little on the host as fits, and as little of that on disk."""

    device: Bytes | None = Field(default=None, description="bytes on the device of each rank, activations aside")
    host: Bytes | None = Field(default=None, description="bytes of a host's memory, for all of its ranks together")
    disk: str | None = Field(
        default=None, description="folder on a local disk, of this job alone, for states that the host has no room for"
    )


class Search(Strict):
    """What `preset: auto` and `shardwise plan` may choose although it changes the numbers of a training."""

    precisions: Names | None = Field(
        default=None, description="dtypes of forward and backward, such as fp32 and bf16; default: the plan's own"
    )
    wires: Names | None = Field(
        default=None,
        description="formats in which gradients may be sent between hosts, such as int8; param=int8: parameters; "
        "default: none but the plan's own",
    )


class LossScale(Strict):
    """The factor of the loss in fp16, so that small gradients do not become zero.

    It doubles after `window` steps without an overflow and halves when `hysteresis` overflows have occurred.
    """

    dynamic: bool = Field(default=True, description="whether it changes; otherwise it stays at initial")
    initial: float = Field(default=65536.0, gt=0, allow_inf_nan=False, description="the first value")
    window: int = Field(default=1000, ge=1, description="steps without an overflow before it doubles")
    hysteresis: int = Field(default=2, ge=1, description="overflows in a row before it halves")
    minimum: float = Field(default=1.0, gt=0, allow_inf_nan=False, description="the smallest value")


class Pipeline(Strict):
    """How the model is split into stages along the mesh axis `pp`, if there is one."""

    schedule: ScheduleName = Field(default="1f1b", description="the order of micro-batches")
    virtual_stages: int | None = Field(
        default=None, ge=1, description="stages on each rank; default: 2 for interleaved, else 1"
    )
    stages: Literal["auto"] | Stages = Field(
        default="auto",
        description="auto (even by parameters), or a list of the module names (h.*) of each stage, in forward order",
    )


class TensorParallel(Strict):
    """How the model is split along the mesh axis `tp`, if there is one."""

    plan: dict[str, Style | TensorRule] | None = Field(
        default=None, description="styles by patterns of module names (h.*.mlp.up); default: the model's own or ours"
    )
    divide: dict[str, Names] = Field(
        default={}, description="by patterns of module names, attributes that count split heads or features"
    )
    sequence: bool = Field(default=False, description="also split the sequence between column and row modules")
    cut_logits: bool = Field(
        default=False, description="leave the logits of a language model of transformers split by vocabulary"
    )
    verify: bool = Field(default=False, description="compare the first batch with the unsplit model, module by module")


class OuterOptimizer(Strict):
    """SGD as torch's, over outer gradients: what the islands' common model was, minus the mean of what they made of
    it."""

    lr: float = Field(default=0.7, gt=0, allow_inf_nan=False, description="learning rate; 1 without momentum averages")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="momentum")
    nesterov: bool = Field(default=True, description="Nesterov's momentum")


class Islands(Strict):
    """When and how the models of islands are brought together, along the mesh axis `island`, if there is one."""

    every: int = Field(default=100, ge=1, description="optimizer steps from one outer step of a parameter to the next")
    optimizer: OuterOptimizer = Field(default=OuterOptimizer(), description="the optimizer of the common model")
    fragments: int = Field(
        default=1, ge=1, description="parts of the model that have outer steps in turn; it divides every"
    )
    overlap: int = Field(
        default=0, ge=0, description="steps that go on while outer gradients are sent; less than every / fragments"
    )
    mix: float = Field(
        default=0.0, ge=0, lt=1, description="share of its own values that an island keeps after an outer step"
    )
    wire: WireFormat = Field(default=WireFormat(), description="outer gradients; default: as master weights")
    tier: Literal["device", "host"] = Field(
        default="host", description="where the common model and its optimizer's state are"
    )


class Loss(Strict):
    """How the loss of a language model of transformers is computed. `whole` or `chunked` alone is enough."""

    shorthand: ClassVar[str] = "whole or chunked"
    stands_for_first: ClassVar[tuple[type, ...]] = (str,)
    logits: Literal["whole", "chunked"] = Field(
        default="whole",
        description="chunked: some tokens' logits at a time, computed again in the backward; whole: all at once",
    )
    chunk: Literal["auto"] | Bytes = Field(
        default="auto", description="bytes of a chunk's logits, in fp32; auto: 64M, or what the head's input takes"
    )


class Fp8(Strict):
    """Linear layers that multiply in 8 bits. The name of a recipe alone is enough."""

    shorthand: ClassVar[str] = "tensorwise, rowwise, rowwise_with_gw_hp, blockwise or mxfp8"
    stands_for_first: ClassVar[tuple[type, ...]] = (str,)
    recipe: Fp8RecipeName | None = Field(
        default=None,
        description="how factors are rounded: tensorwise, rowwise, rowwise_with_gw_hp (weight gradients are not), "
        "blockwise, mxfp8; default: no layer multiplies in 8 bits",
    )
    skip: Names | None = Field(
        default=None,
        description="patterns of names of layers that are left as they are; [] takes all that can; auto, alone or "
        "among others: the first and last linear layer, routers, adapters, layers too small to gain; default: [auto]",
    )


class Profile(Strict):
    """A few steps recorded in detail: a trace of torch's profiler for each rank, with names of units and actions."""

    steps: StepWindow | None = Field(default=None, description="the profiled steps; default: none")
    folder: str | None = Field(default=None, description="folder for traces; default: profile in the run's folder")
    memory: bool = Field(default=False, description="also record the device's allocator, as a snapshot")


class SlowRanks(Strict):
    """Detection, while the job runs, of ranks that the others wait for, where the loop calls `engine.log`."""

    factor: float = Field(
        default=1.5, gt=1, allow_inf_nan=False, description="slow: busy for this many times the median"
    )
    seconds: float = Field(default=60.0, gt=0, allow_inf_nan=False, description="length of the compared window")
    leave: bool = Field(default=False, description="remove a slow rank from an elastic job")
    share: float = Field(
        default=0.1, gt=0, le=1, allow_inf_nan=False, description="warn of what costs this share of a step or more"
    )
    steps: int = Field(default=50, ge=20, description="number of steps over which that is measured")


class Verify(Strict):
    """How often ranks compare what must be the same on them, to find flipped bits. A number is `every`."""

    shorthand: ClassVar[str] = "a whole number of at least 1"
    stands_for_first: ClassVar[tuple[type, ...]] = (int,)
    every: int | None = Field(
        default=None,
        ge=1,
        description="steps from one comparison of parameters, states and reduced gradients to the next; default: never",
    )
    gradients: int | None = Field(
        default=None,
        ge=1,
        description="steps from one recomputation of a micro-batch on another rank to the next, in train_step; "
        "default: never",
    )


class Plan(Strict):
    """How one model is trained: a table, a mesh, and how the table becomes a program."""

    preset: str = Field(default="zero3", description="the table to start from; see `shardwise explain --list`")
    mesh: dict[str, int] | None = Field(
        default=None,
        description="axis sizes, outermost first; one may be -1 (the rest); default: the preset's axes",
    )
    precision: PrecisionName = Field(
        default="fp32",
        description="dtype of parameters in forward and backward; auto: bf16, or fp32 if any rank's device is slow in "
        "bf16; default: the model's own, fp32 where none is known",
    )
    rows: Rows = Field(default=Rows(), description="changes to the preset's table")
    rules: dict[str, Rule] = Field(
        default={},
        description="other rows for some parameters, by a name of your choice; the first match applies",
    )
    resident_below: int = Field(
        default=0, ge=0, description="elements: smaller parameters stay whole on every rank between steps"
    )
    offload: Offload = Field(default=Offload(), description="which share of the model is kept off the device")
    budget: Budget = Field(default=Budget(), description="available memory: sets offload to the least that fits")
    search: Search = Field(
        default=Search(), description="what preset auto may choose although it changes numbers; see docs/auto.md"
    )
    disk: str | None = Field(
        default=None, description="folder on a local disk, of this job alone, for rows on tier disk"
    )
    disk_checksums: bool = Field(
        default=False, description="compute checksums of what is written to the disk, and check them on reading"
    )
    activations: Activations = Field(
        default=Activations(), description="policy for the tensors that forwards save for backwards"
    )
    wire: Wire = Field(default=Wire(), description="dtypes of communication")
    storage: Storage = Field(default=Storage(), description="what lies in memory as codes")
    powersgd: PowerSGD = Field(default=PowerSGD(), description="gradients of matrices sent as thin factors, with ddp")
    loss_scale: LossScale = Field(default=LossScale(), description="for precision fp16 only")
    tensor: TensorParallel = Field(
        default=TensorParallel(), description="tensor parallelism, for a mesh with an axis tp"
    )
    sequence: Sequence = Field(default=Sequence(), description="sequence parallelism, for a mesh with an axis sp")
    loss: Loss = Field(default=Loss(), description="whether the logits of all tokens exist at once")
    fp8: Fp8 = Field(default=Fp8(), description="linear layers that multiply in 8 bits")
    units: Literal["auto"] | Names | UnitRule = Field(
        default="auto",
        description="what is gathered together: auto (the repeated block class), a list of module names "
        "(h.*; a+b is one unit of two), {class: Block}, {class: Block, together: 2}, or {min_numel: 1000000}",
    )
    prefetch_bytes: Literal["auto"] | Bytes = Field(
        default="auto", description="how far gathers may run ahead; auto: the largest unit; 0: not at all"
    )
    paths: Literal["alike", "by_rank"] = Field(
        default="alike",
        description="by_rank: where parameters are gathered, ranks agree on each gather, so that each may call what it "
        "likes; alike: only in recorded passes, and a rank may leave out what was called there",
    )
    compile: str | None = Field(
        default=None, description="backend of torch.compile for each unit, such as inductor; default: not compiled"
    )
    accumulate: int = Field(default=1, ge=1, description="micro-batches per optimizer step")
    pipeline: Pipeline = Field(default=Pipeline(), description="stages and schedule, for a mesh with an axis pp")
    islands: Islands = Field(
        default=Islands(), description="outer steps, for a mesh with an axis island, whose models differ between them"
    )
    clip_grad_norm: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="largest global 2-norm of the gradient"
    )
    skip_nonfinite: bool = Field(
        default=False,
        description="leave out steps whose gradients are not finite, as fp16 always does; each step waits for the GPU",
    )
    sync_buffers: bool = Field(default=True, description="after each step all ranks take rank 0's changed buffers")
    verify: Verify = Field(
        default=Verify(), description="how often ranks compare what must be the same on them, to find flipped bits"
    )
    survive: Literal["host", "buddy", "checkpoint"] | None = Field(
        default=None,
        description="in an elastic job, where state that only one rank holds survives its loss: in its host's memory, "
        "also on another host, or only in the last checkpoint; default: buddy, or host if all ranks are on one host",
    )
    bad_batch: Literal["stop", "skip"] = Field(
        default="stop",
        description="in an elastic job, whether a batch that fails on any rank ends the job or is skipped",
    )
    run: str | None = Field(
        default=None, description="folder of the run: its record, for `shardwise top` and `shardwise report`"
    )
    trackers: Trackers | None = Field(
        default=None, description="trackers that receive the values of engine.log; default: jsonl, the record, with run"
    )
    profile: Profile = Field(default=Profile(), description="steps to profile")

    slow: SlowRanks = Field(default=SlowRanks(), description="when a rank counts as slow, and whether it is removed")
    patience_seconds: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="seconds that a rank waits for others before it logs that; default: the world's, 10",
    )

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    def origin(self, path: str) -> str:
        """Where the value at `path` (such as `"wire.grad"`) came from: file and line, override, argument or default.

        Raises `ConfigError` for a path that does not exist.
        """
        if path in self._origins:
            return self._origins[path]
        wrong = unknown_at(type(self), tuple(path.split(".")))
        if wrong is not None:
            raise ConfigError(f"origin({path!r}): {wrong}")
        return "default"

    @property
    def takes_only_finite(self) -> bool:
        """Whether steps whose gradients are not finite are left out."""
        return self.skip_nonfinite or self.precision == "fp16"

    @property
    def says_islands(self) -> bool:
        """Whether it says how islands come together."""
        return self.islands != Islands()

    @property
    def has_activations_on_disk(self) -> bool:
        """Whether any activations go to a disk, on any rank."""
        rules = (rule.activations for rule in self.rules.values())
        return any(one.policy == "disk" for one in (self.activations, *rules))

    @property
    def follows_model(self) -> bool:
        """Whether each parameter computes in its own dtype, because the plan says no precision."""
        return "precision" not in self.model_fields_set

    @property
    def has_own_precision(self) -> bool:
        """Whether the precision is that of the model, and not one that was asked for."""
        return self._origins.get("precision") == "model"

    def with_own_precision(self, precision: PrecisionName) -> Self:
        """The same plan, in the precision of the model."""
        return self.with_precision(precision, "model")

    def with_precision(self, precision: PrecisionName, origin: str) -> Self:
        """The same plan in another precision, which came from `origin`."""
        plan = self.model_copy(update={"precision": precision})
        plan._origins = {**self._origins, "precision": origin}
        return plan

    def after(self, former: Self) -> Self:
        """The same plan for a model that `former` has laid out: if it says no precision, in the model's own."""
        follows = self.follows_model and former.has_own_precision
        return self.with_own_precision(former.precision) if follows else self

    def with_factors_begun(self) -> Self:
        """The same plan once gradients are sent as factors."""
        return self.model_copy(update={"powersgd": self.powersgd.model_copy(update={"start_step": 0})})

    def with_offload(self, offload: Offload) -> Self:
        """The same plan with its budget replaced by `offload`, which was computed from it."""
        uses_disk = offload.optim_disk > 0 or offload.param_disk > 0
        disk = self.budget.disk if uses_disk and self.budget.disk is not None else self.disk
        plan = self.model_copy(update={"offload": offload, "budget": Budget(), "disk": disk})
        kept = {path: origin for path, origin in self._origins.items() if not path.startswith("budget")}
        chosen = [f"offload.{key}" for key in Offload.model_fields] + (["disk"] if uses_disk else [])
        plan._origins = {**kept, **dict.fromkeys(chosen, "budget")}
        return plan

    def model_post_init(self, _context: object) -> None:
        """Values passed in Python have the origin `argument`; `load_plan` replaces that for files and overrides."""
        given = flatten(self.model_dump(exclude_unset=True))
        self._origins.update(dict.fromkeys(map(".".join, given), "argument"))

    def __eq__(self, other: object) -> bool:
        """Plans are equal if their values are, wherever they came from. The order of axes matters."""
        return isinstance(other, Plan) and self.model_dump_json() == other.model_dump_json()

    def __hash__(self) -> int:
        return hash(self.model_dump_json())


def plan_told(plan: Plan) -> dict[str, Any]:
    """All of `plan` for another process, as JSON has it: its values, and where they came from."""
    return {"values": plan.model_dump(mode="json", exclude_unset=True), "origins": plan._origins}


def plan_heard(told: Mapping[str, Any]) -> Plan:
    plan = Plan(**told["values"])
    plan._origins = dict(told["origins"])
    return plan
