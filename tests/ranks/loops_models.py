"""Actions of the matrix: hooks, dtypes and devices, changes of the model itself, wrappers around it."""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
import torch.distributed as dist
from loops_matrix import VOCAB, WIDTH, Local, Loop, action, sgd
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrizations, parametrize, prune

import shardwise as sw
from tests.drawing import drawing

HOOK, DTYPE, CHANGE, WRAP = ("Hooks", "Dtypes and devices", "Changes of the model", "Wrappers and engines")


def train(loop: Loop) -> Any:
    loss = loop.backward()
    loop.update()
    return Local(loss.item())


# -- hooks --------------------------------------------------------------------------------------------------


def _halve_before(loop: Loop) -> None:
    loop.model.head.weight.register_hook(lambda grad: grad * 0.5)


@action(HOOK, "`p.register_hook(lambda grad: grad * 0.5)` before `shard`", before=_halve_before)
def grad_hook_before(loop: Loop) -> Any:
    return train(loop)


@action(HOOK, "`p.register_hook(lambda grad: grad * 0.5)` after `shard`")
def grad_hook(loop: Loop) -> Any:
    handle = loop.model.head.weight.register_hook(lambda grad: grad * 0.5)
    loss = train(loop)
    handle.remove()
    return loss


@action(HOOK, "`p.register_hook` that looks on: norms by parameter")
def grad_hook_looks(loop: Loop) -> Any:
    seen: dict[str, torch.Tensor] = {}

    def look(name: str) -> Any:
        return lambda grad: seen.update({name: grad.detach().clone()})

    handles = [p.register_hook(look(name)) for name, p in loop.params() if p.requires_grad]
    train(loop)
    for handle in handles:
        handle.remove()
    return Local(dict(sorted(seen.items())))


def _accumulated_before(loop: Loop) -> None:
    seen = loop.notes.setdefault("accumulated", [])
    loop.model.head.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.detach().clone()))


@action(
    HOOK,
    "`p.register_post_accumulate_grad_hook` before `shard`, reads `p.grad`",
    before=_accumulated_before,
    composes=False,
)
def accumulate_hook_before(loop: Loop) -> Any:
    loop.notes["accumulated"].clear()
    train(loop)
    return Local(list(loop.notes["accumulated"]))


@action(HOOK, "`p.register_post_accumulate_grad_hook` after `shard`, reads `p.grad`", composes=False)
def accumulate_hook(loop: Loop) -> Any:
    seen: list[torch.Tensor] = []
    handle = loop.model.head.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.detach().clone()))
    train(loop)
    handle.remove()
    return Local(seen)


@action(HOOK, "an optimizer per parameter in post-accumulate hooks (steps in backward)", composes=False)
def step_in_backward(loop: Loop) -> Any:
    def update(p: nn.Parameter) -> None:
        with torch.no_grad():
            p.sub_(p.grad, alpha=0.1)
        p.grad = None

    handles = [p.register_post_accumulate_grad_hook(update) for p in loop.model.parameters() if p.requires_grad]
    loss = loop.backward()
    for handle in handles:
        handle.remove()
    return Local(loss.item())


@action(HOOK, "`torch.autograd.graph.register_multi_grad_hook([p, q], function)`")
def multi_grad_hook(loop: Loop) -> Any:
    seen: list[list[bool]] = []
    handle = torch.autograd.graph.register_multi_grad_hook(
        list(loop.model.head.parameters()), lambda grads: seen.append([grad is not None for grad in grads])
    )
    loss = train(loop)
    handle.remove()
    return loss, seen[-1]


@action(HOOK, "`p.expand_as(p).grad_fn.next_functions[0][0].register_hook`, reads `p.grad`", composes=False)
def node_hook(loop: Loop) -> Any:
    head, seen = loop.model.head.weight, list[torch.Tensor]()
    node = head.expand_as(head).grad_fn.next_functions[0][0]
    handle = node.register_hook(lambda *_: seen.append(head.grad.detach().clone()))
    train(loop)
    handle.remove()
    return Local(seen)


@action(HOOK, "`torch.autograd.graph.get_gradient_edge(p).node.register_hook`: when a gradient comes")
def edge_hook(loop: Loop) -> Any:
    edge = torch.autograd.graph.get_gradient_edge(loop.model.head.weight)
    seen: list[int] = []
    handle = edge.node.register_hook(lambda *_: seen.append(1))
    loss = train(loop)
    handle.remove()
    return loss, len(seen) > 0


@action(HOOK, "`module.register_forward_hook`, `register_forward_pre_hook`")
def forward_hooks(loop: Loop) -> Any:
    seen: list[torch.Tensor] = []
    handles = [
        loop.model.blocks[0].register_forward_hook(lambda module, args, output: output * 0.5),
        loop.model.blocks[1].register_forward_pre_hook(lambda module, args: seen.append(args[0].detach().mean())),
    ]
    loss = train(loop)
    for handle in handles:
        handle.remove()
    return [loss, Local(sum(seen) / len(seen))]


@action(HOOK, "`module.register_forward_hook` that reads `module.weight`")
def forward_hook_reads(loop: Loop) -> Any:
    seen: list[float] = []
    handle = loop.model.head.register_forward_hook(lambda module, *_: seen.append(module.weight.norm().item()))
    train(loop)
    handle.remove()
    return sum(seen) / len(seen)


@action(HOOK, "`module.register_full_backward_hook`, `register_full_backward_pre_hook`")
def backward_hooks(loop: Loop) -> Any:
    seen: list[torch.Tensor] = []
    handles = [
        loop.model.blocks[0].register_full_backward_hook(lambda module, into, out: seen.append(out[0].norm())),
        loop.model.head.register_full_backward_pre_hook(lambda module, out: (out[0] * 0.5,)),
    ]
    loss = train(loop)
    for handle in handles:
        handle.remove()
    return [loss, len(seen) > 0]


def _backward_hook_before(loop: Loop) -> None:
    loop.model.blocks[0].register_full_backward_hook(lambda module, into, out: (into[0] * 0.5,))


@action(HOOK, "`module.register_full_backward_hook` before `shard`, changes gradients", before=_backward_hook_before)
def backward_hook_before(loop: Loop) -> Any:
    return train(loop)


@action(HOOK, "`torch.nn.modules.module.register_module_forward_hook`, for all modules")
def global_hook(loop: Loop) -> Any:
    mine = {id(module) for module in loop.model.modules()}
    seen: list[str] = []

    def look(module: nn.Module, *_: Any) -> None:
        if id(module) in mine:
            seen.append(type(module).__name__)

    handle = nn.modules.module.register_module_forward_hook(look)
    train(loop)
    handle.remove()
    return sorted(set(seen))


@action(HOOK, "`model.register_state_dict_pre_hook`, `register_load_state_dict_post_hook`")
def state_dict_hooks(loop: Loop) -> Any:
    seen: list[str] = []
    handles = [
        loop.model.register_state_dict_pre_hook(lambda *_: seen.append("pre")),
        loop.model.register_load_state_dict_post_hook(lambda *_: seen.append("post")),
    ]
    loop.model.load_state_dict(loop.model.state_dict())
    for handle in handles:
        handle.remove()
    return seen


# -- dtypes and devices -------------------------------------------------------------------------------------


def converting(name: str, about: str, convert: Any, *, composes: bool = False) -> None:
    def act(loop: Loop) -> Any:
        convert(loop.model)
        return train(loop)

    act.__name__ = name
    action(DTYPE, about, composes=composes)(act)


converting("to_double", "`model.double()`", lambda model: model.double())
converting("to_bfloat16", "`model.bfloat16()`", lambda model: model.bfloat16())
converting("to_half", "`model.half()`", lambda model: model.half())
converting("to_dtype", "`model.to(torch.bfloat16)`", lambda model: model.to(torch.bfloat16))
converting("to_same_device", '`model.to("cpu")`, `model.cpu()`', lambda model: model.to("cpu").cpu(), composes=True)
converting(
    "to_same_dtype", "`model.float()`, `.to(torch.float32)`", lambda m: m.float().to(torch.float32), composes=True
)
converting("to_meta", '`model.to("meta")`', lambda model: model.to("meta"))
converting("part_to_double", "`model.head.double()`: a part", lambda model: model.head.double())
converting("share_memory", "`model.share_memory()`", lambda model: model.share_memory())


@action(DTYPE, "`torch.set_default_device(...)`, and another one for model and data")
def other_default_device(loop: Loop) -> Any:
    batch = loop.batch()
    with torch.device("meta"):
        loss = loop.loss(batch=batch)
        loss.backward()
        loop.update()
        return Local(loss.item())


@action(DTYPE, "`p.data = p.data.double()`", composes=False)
def data_to_double(loop: Loop) -> Any:
    loop.model.head.weight.data = loop.model.head.weight.data.double()
    return train(loop)


@action(DTYPE, "`p.to(torch.float64)`, `p.double()`: a copy")
def param_to_double(loop: Loop) -> Any:
    return [p.detach().double() for p in loop.model.parameters()]


# -- changes of the model -----------------------------------------------------------------------------------


@action(CHANGE, "`module.requires_grad_(False)` for a step, and back")
def frozen_for_a_step(loop: Loop) -> Any:
    loop.model.blocks[0].requires_grad_(False)
    loss = train(loop)
    loop.model.blocks[0].requires_grad_(True)
    return [loss, train(loop)]


@action(CHANGE, "`p.requires_grad = False` of one parameter of a unit, and back")
def one_frozen(loop: Loop) -> Any:
    loop.model.head.bias.requires_grad = False
    loss = train(loop)
    loop.model.head.bias.requires_grad = True
    return loss


@action(CHANGE, "`model.requires_grad_(False)` for a forward, and back")
def all_frozen(loop: Loop) -> Any:
    trainable = [p for p in loop.model.parameters() if p.requires_grad]
    loop.model.requires_grad_(False)
    loss = loop.loss()
    for p in trainable:
        p.requires_grad_(True)
    return Local(loss.item())


@action(CHANGE, "a frozen parameter made trainable, and back", composes=False)
def unfrozen(loop: Loop) -> Any:
    loop.model.offset.requires_grad_(True)
    try:
        loss = train(loop)
    finally:
        loop.model.offset.requires_grad_(False)
    return loss


@action(CHANGE, "`model.head.weight = model.embed.weight`: tied after `shard`", composes=False)
def tied_later(loop: Loop) -> Any:
    loop.model.head.weight = loop.model.embed.weight
    return train(loop)


def _tie(loop: Loop) -> None:
    loop.model.head.weight = loop.model.embed.weight


@action(CHANGE, "weights tied before `shard`", before=_tie, composes=False)
def tied_before(loop: Loop) -> Any:
    return train(loop)


@action(CHANGE, "`model.head.weight = nn.Parameter(...)` after `shard`", composes=False)
def param_replaced(loop: Loop) -> Any:
    loop.model.head.weight = nn.Parameter(torch.full((VOCAB, WIDTH), 0.1))
    return train(loop)


def _linear(width: int, to: int) -> nn.Linear:
    linear = nn.Linear(width, to, device="meta").to_empty(device="cpu")
    nn.init.constant_(linear.weight, 0.05)
    nn.init.zeros_(linear.bias)
    return linear


@action(CHANGE, "`model.head = nn.Linear(...)` after `shard`", composes=False)
def module_replaced(loop: Loop) -> Any:
    loop.model.head = _linear(WIDTH, VOCAB)
    return train(loop)


@action(CHANGE, "`model.blocks.append(module)` after `shard`", composes=False)
def module_added(loop: Loop) -> Any:
    loop.model.blocks.append(_linear(WIDTH, WIDTH))
    return train(loop)


@action(CHANGE, "`del model.blocks[1]` after `shard`", composes=False)
def module_removed(loop: Loop) -> Any:
    if len(loop.model.blocks) > 1:
        del loop.model.blocks[1]
    return train(loop)


@action(CHANGE, "`model.register_parameter(name, ...)` after `shard`", composes=False)
def param_registered(loop: Loop) -> Any:
    loop.model.register_parameter("late", nn.Parameter(torch.ones(3)))
    return train(loop)


@action(CHANGE, "`module.forward = function` after `shard`", composes=False)
def forward_replaced(loop: Loop) -> Any:
    head = loop.model.head
    head.forward = lambda x: nn.functional.linear(x, 0.5 * head.weight, head.bias)
    before = train(loop)
    del head.forward
    return before, train(loop)


@action(CHANGE, "`model.register_buffer(name, ...)` after `shard`")
def buffer_registered(loop: Loop) -> Any:
    loop.model.register_buffer("late_buffer", torch.full((3,), 0.5))
    train(loop)
    return loop.model.late_buffer


@action(CHANGE, "`model.temperature = torch.tensor(...)`: a buffer reassigned")
def buffer_reassigned(loop: Loop) -> Any:
    loop.model.temperature = torch.tensor(1.5)
    train(loop)
    value = loop.model.temperature.clone()
    loop.model.temperature = torch.tensor(1.0)
    train(loop)
    return [value, loop.model.temperature]


@action(CHANGE, "a buffer reassigned with another value on every rank: rank 0's counts after the step")
def buffer_reassigned_unlike(loop: Loop) -> Any:
    loop.batch()
    loop.model.temperature = torch.tensor(1.0 + 0.1 * loop.rank)
    loop.optimizer.zero_grad()
    loop.update()
    return loop.model.temperature.clone()


@action(CHANGE, "`model.temperature.fill_(2)`: a buffer written")
def buffer_written(loop: Loop) -> Any:
    loop.model.temperature.fill_(2.0)
    loss = train(loop)
    loop.model.temperature.fill_(1.0)
    return [loss, loop.model.temperature]


def _weight_norm_before(loop: Loop) -> None:
    parametrizations.weight_norm(loop.model.blocks[0].up)


@action(CHANGE, "`parametrizations.weight_norm` before `shard`", before=_weight_norm_before, composes=False)
def weight_norm_before(loop: Loop) -> Any:
    return train(loop)


def _spectral_norm_before(loop: Loop) -> None:
    with drawing(), torch.random.fork_rng():
        torch.manual_seed(5)
        parametrizations.spectral_norm(loop.model.blocks[0].up)
    loop.model.eval()  # without the power iteration, which the twin would run twice


@action(CHANGE, "`parametrizations.spectral_norm` before `shard`", before=_spectral_norm_before, composes=False)
def spectral_norm_before(loop: Loop) -> Any:
    return train(loop)


class _Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).T


def _symmetric_before(loop: Loop) -> None:
    parametrize.register_parametrization(loop.model.spare, "weight", _Symmetric())


@action(CHANGE, "a parametrization of one's own before `shard`", before=_symmetric_before, composes=False)
def parametrized_before(loop: Loop) -> Any:
    loss = loop.loss() + loop.model.spare(torch.ones(1, WIDTH)).pow(2).mean()
    loss.backward()
    loop.update()
    return Local(loss.item())


@action(CHANGE, "`parametrizations.weight_norm` after `shard`", composes=False)
def weight_norm_later(loop: Loop) -> Any:
    if not parametrize.is_parametrized(loop.model.blocks[0].up):
        parametrizations.weight_norm(loop.model.blocks[0].up)
    return train(loop)


def _prune_before(loop: Loop) -> None:
    prune.l1_unstructured(loop.model.blocks[0].up, "weight", amount=0.3)


@action(CHANGE, "`prune.l1_unstructured` before `shard`", before=_prune_before, composes=False)
def pruned_before(loop: Loop) -> Any:
    return train(loop)


@action(CHANGE, "`prune.l1_unstructured` after `shard`", composes=False)
def pruned_later(loop: Loop) -> Any:
    if not hasattr(loop.model.blocks[0].up, "weight_mask"):
        prune.l1_unstructured(loop.model.blocks[0].up, "weight", amount=0.3)
    return train(loop)


def _old_weight_norm(loop: Loop) -> None:
    nn.utils.weight_norm(loop.model.blocks[0].up)


@action(CHANGE, "`nn.utils.weight_norm`, computed by a hook, before `shard`", before=_old_weight_norm, composes=False)
def old_weight_norm_before(loop: Loop) -> Any:
    return train(loop)


@action(CHANGE, "`nn.utils.remove_weight_norm` after `shard`", before=_old_weight_norm, composes=False)
def old_weight_norm_removed(loop: Loop) -> Any:
    if hasattr(loop.model.blocks[0].up, "weight_g"):
        nn.utils.remove_weight_norm(loop.model.blocks[0].up)
    return train(loop)


@action(CHANGE, "`nn.utils.weight_norm` after `shard`", composes=False)
def old_weight_norm_later(loop: Loop) -> Any:
    if not hasattr(loop.model.blocks[0].up, "weight_g"):
        nn.utils.weight_norm(loop.model.blocks[0].up)
    return train(loop)


@action(CHANGE, "`parametrize.register_parametrization` of a parameter after `shard`", composes=False)
def parametrized_later(loop: Loop) -> Any:
    if not parametrize.is_parametrized(loop.model.spare):
        parametrize.register_parametrization(loop.model.spare, "weight", _Symmetric())
    return train(loop)


@action(CHANGE, "`parametrize.register_parametrization` of a buffer after `shard`", composes=False)
def buffer_parametrized_later(loop: Loop) -> Any:
    if not parametrize.is_parametrized(loop.model):
        parametrize.register_parametrization(loop.model, "temperature", nn.ReLU())
    return train(loop)


@action(CHANGE, "`model.extra = nn.ModuleList()`, then `model.extra.append(module)` after `shard`", composes=False)
def module_added_to_empty_list(loop: Loop) -> Any:
    if not hasattr(loop.model, "extra"):
        loop.model.extra = nn.ModuleList()
    loop.model.extra.append(_linear(WIDTH, WIDTH))
    return train(loop)


@action(CHANGE, "`torch.utils.swap_tensors(p, tensor)`", composes=False)
def tensors_swapped(loop: Loop) -> Any:
    torch.utils.swap_tensors(loop.model.head.weight, nn.Parameter(torch.full((VOCAB, WIDTH), 0.1)))
    return train(loop)


# -- wrappers and engines -----------------------------------------------------------------------------------


@action(WRAP, '`torch.compile(model, backend="eager")`', composes=False)
def compiled(loop: Loop) -> Any:
    torch.compiler.reset()
    model = torch.compile(loop.model, backend="eager")
    loss = loop.loss(model)
    loss.backward()
    loop.update()
    return Local(loss.item())


_GROUP_LOCK = threading.Lock()


def _one_process_group() -> dist.ProcessGroup:
    """A group of this process alone: threads cannot have any other."""
    with _GROUP_LOCK:
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return dist.group.WORLD


@action(WRAP, "`DistributedDataParallel(model)` after `shard`", composes=False)
def wrapped_in_ddp(loop: Loop) -> Any:
    model = nn.parallel.DistributedDataParallel(loop.model, process_group=_one_process_group())
    loss = loop.loss(model)
    loss.backward()
    loop.update()
    return Local(loss.item())


@action(WRAP, "`nn.DataParallel(model)` on a CPU")
def wrapped_in_data_parallel(loop: Loop) -> Any:
    model = nn.DataParallel(loop.model)
    loss = loop.loss(model)
    loss.backward()
    loop.update()
    return Local(loss.item())


@action(WRAP, "a wrapper module of one's own: `nn.Sequential(model)`")
def wrapped_in_module(loop: Loop) -> Any:
    model = nn.Sequential(loop.model)
    loss = loop.loss(model)
    loss.backward()
    loop.update()
    return Local(loss.item())


@action(WRAP, "`torch.jit.trace(model, x)` after `shard`", composes=False)
def traced_by_jit(loop: Loop) -> Any:
    ((x, _), *_) = loop.batch()
    torch.jit.trace(loop.model, x)


@action(WRAP, "`torch.jit.script(model)` after `shard`", composes=False)
def scripted_by_jit(loop: Loop) -> Any:
    torch.jit.script(loop.model)


@action(WRAP, "`torch.export.export(model, (x,))` after `shard`", composes=False)
def exported(loop: Loop) -> Any:
    ((x, _), *_) = loop.batch()
    torch.export.export(loop.model, (x,))


@action(WRAP, "`model(x)` on fake tensors: shapes alone", composes=False)
def called_on_fakes(loop: Loop) -> Any:
    ((x, _), *_) = loop.batch()
    with FakeTensorMode(allow_non_fake_inputs=True):
        return list(loop.model(x).shape)


@action(WRAP, "a second `sw.shard` of the same model", composes=False)
def second_engine(loop: Loop) -> Any:
    if loop.engine is not None:
        sw.shard(loop.model, "zero1", optimizer=sgd(loop.model), world=loop.engine.world)
    return train(loop)


@action(WRAP, "`copy.copy(model)`: another object over the same parameters", composes=False)
def shallow_copy(loop: Loop) -> Any:
    model = copy.copy(loop.model)
    loss = loop.loss(model)
    loss.backward()
    loop.update()
    return Local(loss.item())
