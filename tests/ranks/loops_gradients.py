"""Actions of the matrix: gradients read, written, clipped and zeroed; ways to take a step."""

from __future__ import annotations

import copy
from typing import Any

import torch
from loops_matrix import Action, Local, Loop, action, sgd
from torch import nn

GRAD, WRITE, CLIP, ZERO, STEP, OPTIM = (
    "Gradients read",
    "Gradients written",
    "Clipping",
    "Zeroing",
    "Steps",
    "The optimizer",
)


@action(STEP, "`loss.backward(); optimizer.step(); optimizer.zero_grad()`")
def step(loop: Loop) -> Any:
    loss = loop.backward()
    loop.update()
    return Local(loss.item())


@action("Evaluation", "`with torch.no_grad(): model(x)` on every rank")
def evaluate(loop: Loop) -> Any:
    with torch.no_grad():
        return Local(loop.loss().item())


# -- read ---------------------------------------------------------------------------------------------------


@action(GRAD, "`p.grad.clone()` of every parameter")
def grad_read(loop: Loop) -> Any:
    loop.backward()
    read = {name: None if p.grad is None else p.grad.clone() for name, p in loop.params()}
    loop.update()
    return read


@action(GRAD, "`p.grad.norm().item()` of every parameter, to log it")
def grad_norms(loop: Loop) -> Any:
    loop.backward()
    read = {name: p.grad.norm().item() for name, p in loop.params() if p.grad is not None}
    loop.update()
    return read


@action(GRAD, "`torch.histc(p.grad)`")
def grad_histogram(loop: Loop) -> Any:
    loop.backward()
    grad = loop.model.head.weight.grad
    read = torch.histc(grad, bins=5, min=-1, max=1)
    loop.update()
    return read


@action(GRAD, "`p.grad is None` before and after backward, step and zero_grad")
def grad_is_none(loop: Loop) -> Any:
    def missing() -> list[str]:
        return [name for name, p in loop.params() if p.grad is None]

    seen = [missing()]
    loop.backward()
    seen.append(missing())
    loop.optimizer.step()
    seen.append(missing())
    loop.optimizer.zero_grad()
    return [*seen, missing()]


@action(GRAD, "`p.grad` after `optimizer.step()`, before `zero_grad`")
def grad_after_step(loop: Loop) -> Any:
    loop.backward()
    loop.optimizer.step()
    read = [p.grad.clone() for p in loop.with_grad()]
    loop.optimizer.zero_grad()
    return read


@action(GRAD, "`p.grad` between micro-batches")
def grad_between_micro_batches(loop: Loop) -> Any:
    read = []
    for _ in range(3):
        loop.backward()
        read.append(loop.model.head.weight.grad.norm().item())
    loop.update()
    return read


@action(GRAD, '`engine.get(name, "grad")` between micro-batches')
def engine_grad_between_micro_batches(loop: Loop) -> Any:
    read = []
    for _ in range(3):
        loop.backward()
        read.append(loop.whole_grad("head.weight"))
    loop.update()
    return read


@action(GRAD, "`p.grad.numpy()`, `.tolist()`")
def grad_numpy(loop: Loop) -> Any:
    loop.backward()
    read = [float(loop.model.head.bias.grad.numpy().sum()), loop.model.head.bias.grad.tolist()]
    loop.update()
    return read


@action(GRAD, "`torch.nn.utils.get_total_norm([p.grad ...])`")
def grad_total_norm(loop: Loop) -> Any:
    loop.backward()
    norm = nn.utils.get_total_norm([p.grad for p in loop.with_grad()])
    loop.update()
    return norm.item()


@action(GRAD, "shape, dtype, device of `p.grad`")
def grad_facts(loop: Loop) -> Any:
    loop.backward()
    read = [(list(p.grad.shape), str(p.grad.dtype), str(p.grad.device), p.grad.numel()) for p in loop.with_grad()]
    loop.update()
    return read


@action(GRAD, "`p.grad` of `optimizer.param_groups`")
def grad_by_param_groups(loop: Loop) -> Any:
    loop.backward()
    params = [p for group in loop.optimizer.param_groups for p in group["params"]]
    squares = sum(p.grad.pow(2).sum().item() for p in params if p.grad is not None)
    loop.update()
    return squares


@action(GRAD, "`isfinite` of all gradients, to skip a step")
def grad_finite(loop: Loop) -> Any:
    loop.backward()
    finite = all(p.grad.isfinite().all().item() for p in loop.with_grad())
    if finite:
        loop.optimizer.step()
    loop.optimizer.zero_grad()
    return finite


@action(GRAD, "`if rank == 0:` log `p.grad.norm()`", composes=False)
def grad_read_on_rank_0(loop: Loop) -> Any:
    loop.backward()
    norm = loop.model.head.weight.grad.norm().item() if loop.rank == 0 else 0.0
    loop.update()
    return norm > 0 if loop.rank == 0 else True


# -- written ------------------------------------------------------------------------------------------------


@action(WRITE, "`p.grad.mul_(0.5)`")
def grad_scaled(loop: Loop) -> Any:
    loop.backward()
    for p in loop.with_grad():
        p.grad.mul_(0.5)
    loop.update()


@action(WRITE, "`p.grad /= 2`")
def grad_divided(loop: Loop) -> Any:
    loop.backward()
    for p in loop.with_grad():
        p.grad /= 2
    loop.update()


@action(WRITE, "`p.grad.data.mul_(2)`")
def grad_data(loop: Loop) -> Any:
    loop.backward()
    for p in loop.with_grad():
        p.grad.data.mul_(2)
    loop.update()


@action(WRITE, "`p.grad.add_(noise)`, the same on every rank")
def grad_noise(loop: Loop) -> Any:
    loop.backward()
    numbers = torch.Generator().manual_seed(3)
    for p in loop.with_grad():
        p.grad.add_(torch.randn(p.shape, generator=numbers), alpha=0.01)
    loop.update()


@action(WRITE, "`p.grad = tensor`")
def grad_assigned(loop: Loop) -> Any:
    loop.backward()
    for p in loop.with_grad():
        p.grad = torch.full_like(p, 0.02)
    loop.update()


@action(WRITE, "`p.grad = p.grad.detach().clone() * 2`")
def grad_replaced(loop: Loop) -> Any:
    loop.backward()
    for p in loop.with_grad():
        p.grad = p.grad.detach().clone() * 2
    loop.update()


@action(WRITE, "`p.grad = tensor` without a backward")
def grad_assigned_without_backward(loop: Loop) -> Any:
    loop.batch()
    for p in loop.model.parameters():
        if p.requires_grad:
            p.grad = torch.full(p.shape, 0.03)
    loop.update()


@action(WRITE, "`p.grad = tensor` of another shape")
def grad_of_another_shape(loop: Loop) -> Any:
    loop.backward()
    try:
        loop.model.head.weight.grad = torch.zeros(3)
    except (RuntimeError, ValueError, TypeError):
        return "refused"
    finally:
        loop.update()
    return "accepted"


@action(WRITE, "`kept = p.grad`; `p.grad = tensor`; `p.grad = kept`; then `kept.mul_(0.5)`")
def grad_put_back(loop: Loop) -> Any:
    loop.backward()
    p = loop.model.head.weight
    kept, row = p.grad, p.grad[0]
    p.grad = torch.full_like(p, 0.05)
    seen = row.clone()
    p.grad = kept
    kept.mul_(0.5)
    loop.update()
    return seen


@action(WRITE, "`p.grad, q.grad = q.grad, p.grad`")
def grads_exchanged(loop: Loop) -> Any:
    loop.backward()
    first, second = (block.up.weight for block in loop.model.blocks)
    first.grad, second.grad = second.grad, first.grad
    loop.update()


@action(WRITE, "`p.grad = tensor`, then `tensor.add_(1)`: in PyTorch a write to the gradient")
def grad_assigned_and_written(loop: Loop) -> Any:
    loop.backward()
    tensor = torch.full_like(loop.model.head.weight, 0.05)
    loop.model.head.weight.grad = tensor
    tensor.add_(1)
    loop.update()


@action(WRITE, "`p.grad[0] = 0`: a row that is not to be trained")
def grad_row(loop: Loop) -> Any:
    loop.backward()
    loop.model.embed.weight.grad[0] = 0
    loop.update()


@action(WRITE, "`torch._foreach_mul_([p.grad ...], 0.5)`")
def grad_foreach(loop: Loop) -> Any:
    loop.backward()
    torch._foreach_mul_([p.grad for p in loop.with_grad()], 0.5)
    loop.update()


@action(WRITE, "gradients kept aside, dropped, and added to later ones")
def grad_kept_aside(loop: Loop) -> Any:
    loop.backward()
    kept = {name: p.grad.clone() for name, p in loop.params() if p.grad is not None}
    loop.optimizer.zero_grad()
    loop.backward()
    for name, p in loop.params():
        if name in kept:
            p.grad += kept[name]
    loop.update()


@action(WRITE, "`p.grad = None` of one parameter, which is then left alone")
def grad_none_of_one(loop: Loop) -> Any:
    loop.backward()
    loop.model.head.weight.grad = None
    loop.update()


@action(WRITE, "`p.grad = None` of some parameters, frozen ones among them")
def grad_none_of_frozen(loop: Loop) -> Any:
    loop.backward()
    loop.model.offset.grad = None
    del loop.model.offset.grad
    for p in loop.model.head.parameters():
        p.grad = None
    loop.update()


@action(WRITE, "gradients projected (PCGrad): two backwards, their conflict taken out")
def grad_surgery(loop: Loop) -> Any:
    loop.backward()
    first = [p.grad.clone() for p in loop.with_grad()]
    loop.optimizer.zero_grad()
    loop.backward()
    product = sum((g * p.grad).sum() for g, p in zip(first, loop.with_grad(), strict=True))
    for g, p in zip(first, loop.with_grad(), strict=True):
        p.grad.add_(g, alpha=0.5 if product > 0 else -0.5)
    loop.update()


# -- clipped ------------------------------------------------------------------------------------------------


def clipping(name: str, about: str, **options: Any) -> None:
    def act(loop: Loop) -> Any:
        loop.backward()
        norm = nn.utils.clip_grad_norm_(loop.model.parameters(), **options)
        loop.update()
        return norm.item()

    act.__name__ = name
    action(CLIP, about)(act)


clipping("clip_norm", "`clip_grad_norm_(model.parameters(), 0.1)`", max_norm=0.1)
clipping("clip_norm_inf", "`clip_grad_norm_(..., norm_type=inf)`", max_norm=0.01, norm_type=float("inf"))
clipping("clip_norm_1", "`clip_grad_norm_(..., norm_type=1)`", max_norm=0.5, norm_type=1.0)
clipping("clip_foreach", "`clip_grad_norm_(..., foreach=True)`", max_norm=0.1, foreach=True)
clipping("clip_not_foreach", "`clip_grad_norm_(..., foreach=False)`", max_norm=0.1, foreach=False)
clipping("clip_finite", "`clip_grad_norm_(..., error_if_nonfinite=True)`", max_norm=0.1, error_if_nonfinite=True)
clipping("clip_measured", "`clip_grad_norm_(..., inf)`: the norm alone", max_norm=float("inf"))


@action(CLIP, "`clip_grad_norm_(..., error_if_nonfinite=True)` of infinite gradients")
def clip_nonfinite(loop: Loop) -> Any:
    (loop.loss() * float("inf")).backward()
    try:
        nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1, error_if_nonfinite=True)
    except RuntimeError as error:
        return "non-finite" in str(error)
    finally:
        loop.optimizer.zero_grad()
    return "clipped"


@action(CLIP, "`clip_grad_norm_` twice")
def clip_twice(loop: Loop) -> Any:
    loop.backward()
    norms = [nn.utils.clip_grad_norm_(loop.model.parameters(), limit).item() for limit in (0.2, 0.1)]
    loop.update()
    return norms


@action(CLIP, "`engine.clip_grad_norm_` twice")
def engine_clips_twice(loop: Loop) -> Any:
    loop.backward()
    norms = [loop.clip(0.2), loop.clip(0.1)]
    loop.update()
    return norms


@action(CLIP, "`engine.clip_grad_norm_` under a plan that clips too", plan={"clip_grad_norm": 0.1}, composes=False)
def plan_clips_too(loop: Loop) -> Any:
    loop.backward()
    norm = loop.clip(0.3)
    loop.update()
    return norm


@action(CLIP, "`clip_grad_norm_` between micro-batches")
def clip_between_micro_batches(loop: Loop) -> Any:
    norms = []
    for _ in range(2):
        loop.backward()
        norms.append(nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1).item())
    loop.update()
    return norms


@action(CLIP, "`engine.clip_grad_norm_` between micro-batches")
def engine_clips_between_micro_batches(loop: Loop) -> Any:
    norms = []
    for _ in range(2):
        loop.backward()
        norms.append(loop.clip(0.1))
    loop.update()
    return norms


@action(CLIP, "`clip_grad_norm_(model.head.parameters(), 0.1)`: a part")
def clip_part(loop: Loop) -> Any:
    loop.backward()
    norm = nn.utils.clip_grad_norm_(loop.model.head.parameters(), 0.1)
    loop.update()
    return norm.item()


@action(CLIP, "`clip_grad_norm_` of a single parameter")
def clip_one(loop: Loop) -> Any:
    loop.backward()
    norm = nn.utils.clip_grad_norm_(loop.model.head.weight, 0.05)
    loop.update()
    return norm.item()


@action(CLIP, '`clip_grad_norm_(group["params"])` for every group of the optimizer')
def clip_by_param_groups(loop: Loop) -> Any:
    loop.backward()
    norms = [nn.utils.clip_grad_norm_(group["params"], 0.1).item() for group in loop.optimizer.param_groups]
    loop.update()
    return norms


@action(CLIP, "`clip_grad_value_(model.parameters(), 0.01)`")
def clip_value(loop: Loop) -> Any:
    loop.backward()
    nn.utils.clip_grad_value_(loop.model.parameters(), 0.01)
    loop.update()


@action(CLIP, "`clip_grad_value_(..., foreach=False)`")
def clip_value_not_foreach(loop: Loop) -> Any:
    loop.backward()
    nn.utils.clip_grad_value_(loop.model.parameters(), 0.01, foreach=False)
    loop.update()


@action(CLIP, "`p.grad.clamp_(-0.01, 0.01)`")
def clip_by_hand(loop: Loop) -> Any:
    loop.backward()
    for p in loop.with_grad():
        p.grad.clamp_(-0.01, 0.01)
    loop.update()


@action(CLIP, "`get_total_norm` and `clip_grads_with_norm_`")
def clip_with_norm(loop: Loop) -> Any:
    loop.backward()
    norm = nn.utils.get_total_norm([p.grad for p in loop.with_grad()])
    nn.utils.clip_grads_with_norm_(loop.with_grad(), 0.1, norm)
    loop.update()
    return norm.item()


# -- zeroed -------------------------------------------------------------------------------------------------


def zeroing(name: str, about: str, zero: Any) -> None:
    """Drop gradients with `zero` after a backward that should not count, and again after the step."""

    def act(loop: Loop) -> Any:
        loop.backward()
        zero(loop)
        loop.backward()
        loop.optimizer.step()
        zero(loop)

    act.__name__ = name
    action(ZERO, about)(act)


def each_grad(do: Any) -> Any:
    def zero(loop: Loop) -> None:
        for p in loop.with_grad():
            do(p)

    return zero


def forget(p: nn.Parameter) -> None:
    p.grad = None


def delete(p: nn.Parameter) -> None:
    del p.grad


zeroing("zero_grad", "`optimizer.zero_grad()`", lambda loop: loop.optimizer.zero_grad())
zeroing(
    "zero_grad_to_zero",
    "`optimizer.zero_grad(set_to_none=False)`",
    lambda loop: loop.optimizer.zero_grad(set_to_none=False),
)
zeroing("model_zero_grad", "`model.zero_grad()`", lambda loop: loop.model.zero_grad())
zeroing(
    "model_zero_grad_to_zero",
    "`model.zero_grad(set_to_none=False)`",
    lambda loop: loop.model.zero_grad(set_to_none=False),
)
zeroing("zero_by_none", "`p.grad = None` of every parameter", each_grad(forget))
zeroing("zero_by_del", "`del p.grad` of every parameter", each_grad(delete))
zeroing("zero_in_place", "`p.grad.zero_()` of every parameter", each_grad(lambda p: p.grad.zero_()))
zeroing("zero_by_data", "`p.grad.data.zero_()`", each_grad(lambda p: p.grad.data.zero_()))
zeroing("zero_detached", "`p.grad.detach_(); p.grad.zero_()`", each_grad(lambda p: (p.grad.detach_(), p.grad.zero_())))
zeroing("zero_foreach", "`torch._foreach_zero_`", lambda loop: torch._foreach_zero_([p.grad for p in loop.with_grad()]))


@action(ZERO, "`model.head.zero_grad()`: a part")
def zero_part(loop: Loop) -> Any:
    loop.backward()
    loop.model.head.zero_grad()
    loop.backward()
    loop.update()


@action(ZERO, "`optimizer.zero_grad(set_to_none=False)` before a step that then decays only")
def zero_before_step(loop: Loop) -> Any:
    loop.backward()
    loop.optimizer.zero_grad(set_to_none=False)
    loop.optimizer.step()
    loop.optimizer.zero_grad()


@action(ZERO, "`zero_grad()` at the top of the loop")
def zero_first(loop: Loop) -> Any:
    loop.optimizer.zero_grad()
    loss = loop.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return Local(loss.item())


@action(ZERO, "no `zero_grad` for two steps: gradients add up")
def never_zeroed(loop: Loop) -> Any:
    for _ in range(2):
        loop.backward()
        loop.optimizer.step()
    loop.optimizer.zero_grad()


# -- steps --------------------------------------------------------------------------------------------------


@action(STEP, "`optimizer.step(closure)`, the closure runs forward and backward")
def closure(loop: Loop) -> Any:
    batch = loop.batch()

    def evaluate_again() -> torch.Tensor:
        loop.optimizer.zero_grad()
        loss = loop.loss(batch=batch)
        loss.backward()
        return loss

    loss = loop.optimizer.step(evaluate_again)
    loop.optimizer.zero_grad()
    return Local(loss.item())


@action(STEP, "`optimizer.step()` twice on the same gradients")
def step_twice(loop: Loop) -> Any:
    loop.backward()
    loop.optimizer.step()
    loop.update()


@action(STEP, "`optimizer.step()` without a backward")
def step_without_backward(loop: Loop) -> Any:
    loop.batch()
    loop.update()


@action(STEP, "three micro-batches, then a step")
def accumulated(loop: Loop) -> Any:
    losses = []
    for _ in range(3):
        loss = loop.loss() / 3
        loss.backward()
        losses.append(loss.item())
    loop.update()
    return Local(losses)


@action(STEP, "a step left out: backward, `zero_grad`, on to the next batch")
def step_left_out(loop: Loop) -> Any:
    loop.backward()
    loop.optimizer.zero_grad()


@action(STEP, "a torch scheduler: `LambdaLR.step()`")
def scheduler(loop: Loop) -> Any:
    schedule = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, lambda count: 1 / (1 + count))
    for _ in range(2):
        loop.backward()
        loop.update()
        schedule.step()
    return [*schedule.get_last_lr(), loop.optimizer.param_groups[0]["lr"]]


@action(STEP, "`ReduceLROnPlateau.step(loss)`, the ranks' mean loss")
def plateau(loop: Loop) -> Any:
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(loop.optimizer, patience=0, factor=0.5)
    for value in (1.0, 2.0, 3.0):
        loop.backward()
        loop.update()
        schedule.step(value)
    return loop.optimizer.param_groups[0]["lr"]


# -- the optimizer ------------------------------------------------------------------------------------------


@action(OPTIM, '`optimizer.param_groups[0]["lr"] = ...`, weight decay and momentum too')
def group_settings(loop: Loop) -> Any:
    group = loop.optimizer.param_groups[0]
    before = {key: group[key] for key in ("lr", "weight_decay", "momentum")}
    group.update(lr=0.02, weight_decay=0.2, momentum=0.5)
    loop.backward()
    loop.update()
    group.update(before)


@action(OPTIM, "`optimizer.add_param_group` after `shard`, of a parameter that is not the model's")
def add_param_group(loop: Loop) -> Any:
    loop.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    loop.backward()
    loop.update()


def two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    head = list(model.head.parameters())
    ids = {id(p) for p in head}
    rest = [p for p in model.parameters() if id(p) not in ids]
    return [torch.optim.SGD(rest, lr=0.1, momentum=0.9), torch.optim.SGD(head, lr=0.02)]


@action(OPTIM, "two optimizers over disjoint parameters", make_optimizers=two_optimizers, composes=False)
def both_optimizers(loop: Loop) -> Any:
    loop.backward()
    for optimizer in loop.optimizers:
        optimizer.step()
    for optimizer in loop.optimizers:
        optimizer.zero_grad()


@action(OPTIM, "two optimizers in turn (GAN style)", make_optimizers=two_optimizers, composes=False)
def optimizers_in_turn(loop: Loop) -> Any:
    for optimizer in loop.optimizers:
        for one in loop.optimizers:
            one.zero_grad()
        loop.backward()
        optimizer.step()
    for optimizer in loop.optimizers:
        optimizer.zero_grad()


@action(
    OPTIM,
    "two optimizers (GAN style): a backward, after a step of one, through what only the other's parameters have made",
    make_optimizers=two_optimizers,
    composes=False,
)
def backward_after_the_others_step(loop: Loop) -> Any:
    rest, head = loop.optimizers
    made = [(loop.model.features(x), y) for x, y in loop.batch()]
    for of_rest, optimizer in ((False, head), (True, rest)):
        for hidden, y in made:
            logits = loop.model.head(hidden if of_rest else hidden.detach())
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
            (loss / len(made)).backward()
        optimizer.step()
        for one in loop.optimizers:
            one.zero_grad()


def head_only(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9)


@action(
    OPTIM,
    "an optimizer over a part: `zero_grad()` leaves the others' gradients, which add up and are clipped with its own",
    make_optimizers=head_only,
    composes=False,
)
def optimizer_of_a_part(loop: Loop) -> Any:
    norms = []
    for _ in range(2):
        loop.optimizer.zero_grad()
        loop.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1).item())
        loop.optimizer.step()
    loop.optimizer.zero_grad()
    return norms, {name: param.grad.clone() for name, param in loop.params() if param.grad is not None}


@action(
    OPTIM, "the same between micro-batches and before a step, with zeros", make_optimizers=head_only, composes=False
)
def optimizer_of_a_part_zeroes(loop: Loop) -> Any:
    loop.backward()
    loop.optimizer.zero_grad(set_to_none=False)
    first = [param.grad is not None for _, param in loop.params()]
    loop.backward()
    loop.update()
    loop.backward()
    loop.optimizer.step()
    grads = {name: param.grad.clone() for name, param in loop.params() if param.grad is not None}
    loop.model.zero_grad()
    return first, grads


@action(
    OPTIM,
    "the same, and a group added for parameters whose gradients have added up",
    make_optimizers=head_only,
    composes=False,
)
def optimizer_of_a_part_grows(loop: Loop) -> Any:
    loop.backward()
    loop.update()
    if len(loop.optimizer.param_groups) == 1:
        loop.optimizer.add_param_group({"params": loop.model.blocks[1].parameters(), "lr": 0.05})
    for _ in range(2):
        loop.backward()
        loop.update()
    norm = torch.nn.utils.get_total_norm([param.grad for param in loop.with_grad()])
    loop.model.zero_grad()
    return norm


@action(
    OPTIM,
    "two optimizers over the same parameters, given to `shard`",
    make_optimizers=lambda model: [sgd(model), torch.optim.AdamW(model.parameters(), eps=1e-4)],
    composes=False,
)
def two_over_the_same(loop: Loop) -> Any:
    loop.backward()
    for optimizer in loop.optimizers:
        optimizer.step()
    for optimizer in loop.optimizers:
        optimizer.zero_grad()


@action(OPTIM, '`group["params"] = some of them` after `shard`', composes=False)
def group_shortened(loop: Loop) -> Any:
    (group,) = loop.optimizer.param_groups
    before = group["params"]
    group["params"] = before[1:]
    try:
        step(loop)
    finally:
        group["params"] = before


@action(OPTIM, '`group["params"][i] = parameter` after `shard`', composes=False)
def group_element_replaced(loop: Loop) -> Any:
    (group,) = loop.optimizer.param_groups
    before = group["params"][0]
    group["params"][0] = nn.Parameter(torch.zeros(1))
    try:
        step(loop)
    finally:
        group["params"][0] = before


@action(OPTIM, "an optimizer that is made after `shard`")
def optimizer_made_later(loop: Loop) -> Any:
    later = torch.optim.SGD(loop.model.parameters(), lr=0.05)
    loop.backward()
    later.step()
    later.zero_grad()
    loop.optimizer.zero_grad()


@action(OPTIM, "an optimizer that is made after `shard`, with `fused=True`")
def fused_made_later(loop: Loop) -> Any:
    later = torch.optim.AdamW(loop.model.parameters(), lr=0.01, eps=1e-2, fused=True)
    loop.backward()
    later.step()
    later.zero_grad()
    loop.optimizer.zero_grad()


@action(OPTIM, '`optimizer.state[p]["momentum_buffer"]` read')
def state_read(loop: Loop) -> Any:
    loop.backward()
    state = loop.optimizer.state[loop.model.head.weight]
    norm = state["momentum_buffer"].norm().item() if "momentum_buffer" in state else None
    loop.update()
    return norm


@action(OPTIM, '`optimizer.state[p]["momentum_buffer"].zero_()`')
def state_written(loop: Loop) -> Any:
    for p in loop.model.parameters():
        if "momentum_buffer" in loop.optimizer.state.get(p, {}):
            loop.optimizer.state[p]["momentum_buffer"].zero_()
    loop.backward()
    loop.update()


@action(OPTIM, "`optimizer.state.clear()`: moments forgotten")
def state_cleared(loop: Loop) -> Any:
    loop.optimizer.state.clear()
    loop.backward()
    loop.update()


@action(OPTIM, "`optimizer.load_state_dict(copy of optimizer.state_dict())`: a step back")
def state_dict_round(loop: Loop) -> Any:
    kept = copy.deepcopy(loop.optimizer.state_dict())
    loop.backward()
    loop.update()
    loop.optimizer.load_state_dict(kept)
    loop.backward()
    loop.update()


@action(OPTIM, '`optimizer.state_dict()["state"]` read: a moment\'s norm')
def state_dict_read(loop: Loop) -> Any:
    loop.backward()
    state = loop.optimizer.state_dict()["state"]
    read = {number: entry["momentum_buffer"].norm().item() for number, entry in state.items() if entry}
    loop.update()
    return read


@action(OPTIM, "`optimizer.register_step_pre_hook` and `post_hook`")
def step_hooks(loop: Loop) -> Any:
    seen: list[str] = []
    handles = [
        loop.optimizer.register_step_pre_hook(lambda *_: seen.append("before")),
        loop.optimizer.register_step_post_hook(lambda *_: seen.append("after")),
    ]
    loop.backward()
    loop.update()
    for handle in handles:
        handle.remove()
    return seen


@action(OPTIM, "`optimizer.register_state_dict_post_hook`, `register_load_state_dict_pre_hook`: whole states, changed")
def optimizer_state_hooks(loop: Loop) -> Any:
    seen: list[Any] = []

    def moments(state: dict[str, Any]) -> dict[int, torch.Tensor]:
        kept = {number: entry.get("momentum_buffer") for number, entry in state["state"].items()}
        return {number: moment for number, moment in kept.items() if moment is not None}

    def saved(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        seen.append({number: moment.norm().item() for number, moment in moments(state).items()})
        return {"own": "a key", **state}

    def loaded(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        seen.append([state.pop("own"), {number: list(moment.shape) for number, moment in moments(state).items()}])
        return {**state, "state": {number: {"momentum_buffer": 0.5 * one} for number, one in moments(state).items()}}

    handles = [
        loop.optimizer.register_state_dict_post_hook(saved, prepend=True),
        loop.optimizer.register_load_state_dict_pre_hook(loaded),
        loop.optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded")),
    ]
    loop.backward()
    loop.optimizer.load_state_dict(copy.deepcopy(loop.optimizer.state_dict()))
    loop.update()
    for handle in handles:
        handle.remove()
    return seen


@action(OPTIM, "`optimizer.state.values()`: norms of all moments")
def states_walked(loop: Loop) -> Any:
    norms = [entry["momentum_buffer"].norm().item() for entry in loop.optimizer.state.values()]
    loop.backward()
    loop.update()
    return norms


@action(OPTIM, "`optimizer.register_step_pre_hook` and `post_hook` that read `p` and `p.grad` by `param_groups`")
def step_hooks_read(loop: Loop) -> Any:
    seen: list[Any] = []

    def read(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        seen.append([(p.detach().norm().item(), None if p.grad is None else p.grad.norm().item()) for p in params])

    handles = [loop.optimizer.register_step_pre_hook(read), loop.optimizer.register_step_post_hook(read)]
    loop.backward()
    loop.update()
    for handle in handles:
        handle.remove()
    return [[list(pair) for pair in one] for one in seen]


@action(OPTIM, '`optimizer.param_groups[i]["params"]` read: weights by group')
def params_by_groups(loop: Loop) -> Any:
    return [p.detach().clone() for group in loop.optimizer.param_groups for p in group["params"]]


@action(OPTIM, "`p.numel()`, `p.shape` of `optimizer.param_groups`, to count")
def counted_by_groups(loop: Loop) -> Any:
    return [(p.numel(), list(p.shape)) for group in loop.optimizer.param_groups for p in group["params"]]


@action(OPTIM, "`p is q` for `optimizer.param_groups` and `model.named_parameters()`: names by group")
def names_by_groups(loop: Loop) -> Any:
    names = {p: name for name, p in loop.model.named_parameters()}
    return [names.get(p) for group in loop.optimizer.param_groups for p in group["params"]]


@action(OPTIM, "`p.mul_(0.9)` for every parameter of `optimizer.param_groups`: decay by hand")
def written_by_groups(loop: Loop) -> Any:
    loop.backward()
    with torch.no_grad():
        for group in loop.optimizer.param_groups:
            for p in group["params"]:
                p.mul_(0.9)
                if p.grad is not None:
                    p.grad.mul_(0.5)
    loop.update()


@action(OPTIM, "`copy.deepcopy(optimizer)`")
def optimizer_copied(loop: Loop) -> Any:
    copied = copy.deepcopy(loop.optimizer)
    return len(copied.param_groups)


__all__ = ["Action"]
