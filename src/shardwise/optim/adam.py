"""AdamW whose two states may be narrower than the parameter: bf16, or 8 bits per number.

[Note: narrow states] With beta2 = 0.999 the second moment moves by a thousandth of its distance in a step, which is
less than half of bf16's last place (2^-9): rounded to nearest it would stop moving, and never decay. So it is rounded
stochastically, up with a probability equal to the fraction that is cut off, which is right on average and takes no
memory; Kahan summation would take two more bytes per parameter (both: arXiv:2010.06192). The first moment, with beta1 =
0.9, is rounded to nearest. The random bits are a hash of parameter, element and step, so that copies of a state stay
equal, a resumed run continues identically, and a sharded run rounds like a plain one. 8-bit states: see `quantize.py`.

Narrow states leave a rank in fp32 (checkpoints, changes of plan, ranks that are lost): another mesh would cut the
blocks of 8-bit codes, and no other software could read them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.adamw import adamw

from shardwise.errors import ConfigError
from shardwise.optim.cooperative import Alone, Cooperative, Params, evaluated
from shardwise.optim.quantize import SIGNED, UNSIGNED, Coded, decode, encode
from shardwise.program import BLOCK, SMALL_NUMEL, Update, state_of

Tensor = torch.Tensor
StateDtype = Literal["fp32", "bf16", "int8"]
MOMENTS = {"exp_avg": SIGNED, "exp_avg_sq": UNSIGNED}
CACHE_NUMEL, DEVICE_NUMEL = 2**18, 2**24
"""Elements that are widened at a time, multiples of the block: on a CPU few enough for the cache; elsewhere enough to
keep the device busy, and few enough to take hardly any memory."""
FUSED_DEVICES = ("cpu", "cuda", "xpu")
"""Devices for which torch has one kernel for a whole update."""


class AdamW(Cooperative):
    """AdamW (arXiv:1711.05101) with the arguments of `torch.optim.AdamW` and a dtype for its states.

    `state_dtype` may also be set per group. `fp32` (which here means the parameters' own dtype) takes 8 bytes per
    parameter, `bf16` 4, `int8` 2.03. `state_dict()` has the states in fp32 under the names that `torch.optim.AdamW`
    uses, so that each loads the other's. Raises `ConfigError` for another `state_dtype`.
    """

    own_settings = frozenset({"state_dtype"})

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state_dtype: StateDtype = "fp32",
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "state_dtype": state_dtype}
        super().__init__(params, defaults)

    def check_group(self, group: Mapping[str, Any]) -> None:
        if group["state_dtype"] not in ("fp32", "bf16", "int8"):
            raise ConfigError(f"state_dtype is {group['state_dtype']!r}; it is fp32, bf16 or int8.")

    def update_of(self, param: nn.Parameter, group: Mapping[str, Any]) -> Update:
        return Update(state_of(group["state_dtype"], len(MOMENTS), param.numel()))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. Parameters with full-width states are updated in one call per group, others slice by slice."""
        loss = evaluated(closure)
        batched = BatchedUpdate()
        for number, param, group in self.members():
            if param.grad is None:
                continue
            state = self._stepped(param)
            kind = self._kind(param, group)
            is_alike = state["exp_avg"].dtype == param.dtype == param.grad.dtype and param.is_contiguous()
            if kind == "fp32" and is_alike:
                batched.add(param, param.grad, state, group)
            else:
                self._update_slices(number, param, param.grad, kind, group)
        batched.update()
        return loss

    def _stepped(self, param: nn.Parameter) -> dict[str, Any]:
        """The state of `param`, with its step count incremented."""
        if not self.state[param]:
            self.accept_state(param, {"step": torch.tensor(0.0, device="cpu"), **dict.fromkeys(MOMENTS)})
        state: dict[str, Any] = self.state[param]
        state["step"] += 1
        return state

    def _update_slices(
        self, number: int, param: nn.Parameter, grads: Tensor, kind: StateDtype, group: Mapping[str, Any]
    ) -> None:
        step = int(self.state[param]["step"])
        kept = _MomentStates(self.state[param], kind, self.peers.start_of(param), seed=number * 0x9E3779B1 + step)
        flat, grad = param.detach().reshape(-1), grads.detach().reshape(-1)
        for start, stop in kept.slices(flat.numel()):
            wide = flat[start:stop].to(kept.dtype)
            moments = {name: kept.read(name, start, stop) for name in MOMENTS}
            exp_avg, exp_avg_sq = moments["exp_avg"], moments["exp_avg_sq"]
            update_adamw([wide], [grad[start:stop].to(kept.dtype)], [exp_avg], [exp_avg_sq], step, group)
            for name, value in moments.items():
                kept.write(name, start, stop, value)
            if wide.dtype != flat.dtype:
                flat[start:stop] = wide
        if not param.is_contiguous():  # what was updated is a copy then
            param.copy_(flat.view(param.shape))

    def _kind(self, param: nn.Parameter, group: Mapping[str, Any]) -> StateDtype:
        """The dtype of the states of `param`: small parameters keep full-width states instead of 8-bit ones."""
        kind: StateDtype = group["state_dtype"]
        is_small = kind == "int8" and torch.Size(self.peers.shape_of(param)).numel() < SMALL_NUMEL
        return "fp32" if is_small else kind

    def dense_state(self, param: nn.Parameter) -> dict[str, Any]:
        state = self.state.get(param, {})
        if not state:
            return {}
        kept = _MomentStates(state, self._kind(param, self._group_of(param)), self.peers.start_of(param))
        wide = {name: kept.read(name, 0, param.numel()).view(param.shape) for name in MOMENTS}
        return {"step": state["step"], **wide}

    def kept_state(self, param: nn.Parameter) -> dict[str, Any]:
        return dict(self.state.get(param, {})) if self.narrow_keys(param) else self.dense_state(param)

    def narrow_keys(self, param: nn.Parameter) -> frozenset[str]:
        """8-bit states are not among them: a code means nothing without the scale of its block."""
        return frozenset(MOMENTS) if self._kind(param, self._group_of(param)) == "bf16" else frozenset()

    def coded_keys(self, param: nn.Parameter) -> Mapping[str, Coded]:
        if self._kind(param, self._group_of(param)) != "int8":
            return {}
        start = self.peers.start_of(param)
        return {name: Coded(scales_of(name), levels is SIGNED, start) for name, levels in MOMENTS.items()}

    def accept_state(self, param: nn.Parameter, state: Mapping[str, Any]) -> None:
        """Load states in fp32, flat or shaped; `None` for zeros."""
        if not state:
            self.state[param] = {}
            return
        own: dict[str, Any] = {"step": torch.as_tensor(state["step"], dtype=torch.float32, device="cpu").cpu().clone()}
        kept = _MomentStates(own, self._kind(param, self._group_of(param)), self.peers.start_of(param))
        kept.allocate_zeros(param)
        for name in MOMENTS:
            if state[name] is not None:
                kept.write(name, 0, param.numel(), state[name].reshape(-1).to(param.device), exact=True)
        self.state[param] = own

    def state_dict(self) -> dict[str, Any]:
        """States in fp32, as `torch.optim.AdamW` writes them. For a sharded model they are whole, and all ranks
        call."""
        if not isinstance(self.peers, Alone):
            return super().state_dict()  # answered by the engine, in fp32
        states = {number: self.dense_state(param) for number, param, _ in self.members()}
        return {**super().state_dict(), "state": {number: state for number, state in states.items() if state}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states in fp32, and store them in `state_dtype`."""
        super().load_state_dict(state_dict)
        for _, param, _ in self.members():
            self.accept_state(param, self.state.get(param, {}))

    def _group_of(self, param: nn.Parameter) -> dict[str, Any]:
        return next(group for group in self.param_groups if any(param is other for other in group["params"]))


class BatchedUpdate:
    """Parameters that one call of AdamW updates: alike in group, step, dtype and device."""

    def __init__(self) -> None:
        self._alike: dict[tuple[Any, ...], list[tuple[Tensor, Tensor, Tensor, Tensor]]] = {}
        self._groups: dict[int, Mapping[str, Any]] = {}

    def add(self, param: Tensor, grad: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> None:
        """`state` has the moments, laid out like `param`, and the number of this step."""
        self._groups[id(group)] = group
        if grad.stride() != param.stride():  # torch's kernel walks through memory without checking strides
            grad = torch.empty_like(param).copy_(grad)
        key = (id(group), int(state["step"]), param.dtype, param.device)
        self._alike.setdefault(key, []).append((param, grad, state["exp_avg"], state["exp_avg_sq"]))

    def update(self) -> None:
        for (group, step, _, _), every in self._alike.items():
            params, grads, exp_avgs, exp_avg_sqs = (list(tensors) for tensors in zip(*every, strict=True))
            update_adamw(params, grads, exp_avgs, exp_avg_sqs, step, self._groups[group])


def update_adamw(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    step: int,
    group: Mapping[str, Any],
) -> None:
    """One in-place AdamW update of tensors of one dtype and device, by torch's own function; `step` counts from 1.

    Torch reads step counts on the device of its kernel. They are created there, because a copy from the host would wait
    for the device.
    """
    beta1, beta2 = group["betas"]
    device = params[0].device
    is_fused = device.type in FUSED_DEVICES and params[0].is_floating_point()
    steps = torch.full((len(params),), step - 1.0, device=device if is_fused else None)
    adamw(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        list(steps.unbind()),
        foreach=not is_fused and device.type != "cpu",
        fused=is_fused,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


class _MomentStates:
    """The states of one parameter in their storage dtype: read and written in fp32, in slices that cut no block."""

    def __init__(self, state: dict[str, Any], kind: StateDtype, start: int, seed: int = 0) -> None:
        self._state = state
        self._kind = kind
        self._start = start
        self._seed = seed

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the update is computed: fp32, or the parameter's own if states have it."""
        own: torch.dtype = self._state["exp_avg"].dtype
        return own if self._kind == "fp32" else torch.float32

    def allocate_zeros(self, param: Tensor) -> None:
        """Zeros for every state of `param`."""
        for name in MOMENTS:
            dtype = {"fp32": param.dtype, "bf16": torch.bfloat16, "int8": torch.uint8}[self._kind]
            self._state[name] = torch.zeros(param.shape, dtype=dtype, device=param.device)
            if self._kind == "int8":
                num_blocks = -(-(self._start + param.numel()) // BLOCK) - self._start // BLOCK if param.numel() else 0
                self._state[scales_of(name)] = torch.zeros(num_blocks, device=param.device)

    def slices(self, numel: int) -> list[tuple[int, int]]:
        """Ranges of this rank's elements. States that are not narrow are not sliced."""
        if self._kind == "fp32":
            return [(0, numel)]
        lead = self._start % BLOCK
        slice_numel = CACHE_NUMEL if self._state["exp_avg"].device.type == "cpu" else DEVICE_NUMEL
        cuts = [0, *range(slice_numel - lead, numel, slice_numel), numel]
        return list(itertools.pairwise(cuts))

    def read(self, name: str, start: int, stop: int) -> Tensor:
        kept: Tensor = self._state[name].view(-1)[start:stop]
        if self._kind == "fp32":
            return kept
        if self._kind == "bf16":
            return kept.float()
        return decode(kept, self._scales(name, start, stop), self._start + start, MOMENTS[name])

    def write(self, name: str, start: int, stop: int, value: Tensor, *, exact: bool = False) -> None:
        kept: Tensor = self._state[name].view(-1)[start:stop]
        if self._kind == "int8":
            codes, scales = encode(value, self._start + start, MOMENTS[name])
            kept.copy_(codes)
            self._scales(name, start, stop).copy_(scales)
        elif self._kind == "bf16" and name == "exp_avg_sq" and not exact:
            kept.copy_(round_stochastically(value, self._start + start, self._seed))
        elif kept.data_ptr() != value.data_ptr():
            kept.copy_(value)

    def _scales(self, name: str, start: int, stop: int) -> Tensor:
        first = self._start // BLOCK
        blocks = slice((self._start + start) // BLOCK - first, -(-(self._start + stop) // BLOCK) - first)
        scales: Tensor = self._state[scales_of(name)][blocks]
        return scales


def scales_of(name: str) -> str:
    """The name of the state with the scales of another."""
    return f"{name}_scale"


def round_stochastically(values: Tensor, start: int, seed: int) -> Tensor:
    """fp32 to bf16, each element up or down with the probability that makes it right on average.

    The random bits are a hash (the finalizer of MurmurHash3) of `seed` and of each element's number, counted from
    `start`.
    """
    bits = torch.arange(values.numel(), dtype=torch.int32, device=values.device)
    bits.add_(_signed(start)).mul_(_signed(0x9E3779B1)).add_(_signed(seed * 0x85EBCA77))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits ^= (bits >> shift) & ((1 << (32 - shift)) - 1)
        bits *= _signed(factor)
    bits ^= bits >> 16
    cut = (values.view(torch.int32) + (bits & 0xFFFF)) & _signed(0xFFFF0000)
    return cut.view(torch.float32).to(torch.bfloat16)


def _signed(word: int) -> int:
    """The lowest 32 bits of `word`, read as int32."""
    return (word + 2**31) % 2**32 - 2**31
