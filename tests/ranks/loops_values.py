"""Actions of the matrix: parameters read and written, losses, autograd, evaluation."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from typing import Any

import torch
import torch.nn.functional as F
from loops_matrix import VOCAB, WIDTH, Local, Loop, action, cross_entropy
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.patience import PATIENCE

READ, WRITE, LOSS, GRAD, EVAL, ERROR = (
    "Parameters read",
    "Parameters written",
    "Losses",
    "Autograd",
    "Evaluation",
    "Errors",
)


# -- read ---------------------------------------------------------------------------------------------------


@action(READ, "`p.detach().clone()` of every parameter, `named_parameters()`")
def params_read(loop: Loop) -> Any:
    return {name: p.detach().clone() for name, p in loop.params()}


@action(READ, "`p.data`")
def data_read(loop: Loop) -> Any:
    return [p.data.clone() for p in loop.model.parameters()]


@action(READ, "`p.sum().item()`, `p.norm()`, `p.abs().max()`, to log them")
def params_logged(loop: Loop) -> Any:
    with torch.no_grad():
        return [[p.sum().item(), p.norm().item(), p.abs().max().item()] for p in loop.model.parameters()]


@action(READ, "`print(p)`, `repr(p)`")
def params_printed(loop: Loop) -> Any:
    print(loop.model.head.bias)
    return isinstance(repr(loop.model.logit_scale), str), f"{loop.model.logit_scale.item():.4f}"


@action(READ, "`float(p)`, `p.item()` of a scalar parameter")
def scalar_read(loop: Loop) -> Any:
    return [float(loop.model.logit_scale), loop.model.logit_scale.item()]


@action(READ, "`p.detach().numpy()`, `.tolist()`")
def params_numpy(loop: Loop) -> Any:
    return [float(loop.model.head.weight.detach().numpy().sum()), loop.model.head.bias.tolist()]


@action(READ, "`a = p.detach().numpy()`, then `a[0] = 0`: in PyTorch a write to the parameter", composes=False)
def array_written(loop: Loop) -> Any:
    loop.model.head.weight.detach().numpy()[0] = 0


@action(READ, "`torch.from_dlpack(p.detach())`: in PyTorch the same memory", composes=False)
def given_as_dlpack(loop: Loop) -> Any:
    torch.from_dlpack(loop.model.head.weight.detach())[0] = 0


@action(READ, "`p.to_sparse()`")
def params_sparse(loop: Loop) -> Any:
    return loop.model.head.weight.to_sparse().to_dense().detach()


@action(READ, "`p.detach().cpu()`")
def params_to_host(loop: Loop) -> Any:
    return [p.detach().cpu().clone() for p in loop.model.parameters()]


@action(READ, "`{name: p.cpu() ...}`, pickled by one rank")
def params_taken_away(loop: Loop) -> Any:
    taken = {name: p.cpu() for name, p in loop.params()}
    return [pickle.loads(pickle.dumps(p)).detach() for p in taken.values()]


@action(READ, "`model.head.weight[0]`, `model.get_parameter(name)`, `model.embed.weight[ids]`")
def params_indexed(loop: Loop) -> Any:
    return [
        loop.model.head.weight[0].detach(),
        loop.model.get_parameter("blocks.1.up.weight")[:, 1].detach(),
        loop.model.embed.weight[torch.tensor([1, 2])].detach(),
    ]


@action(READ, "`parameters_to_vector(model.parameters())`")
def params_to_vector(loop: Loop) -> Any:
    return nn.utils.parameters_to_vector(loop.model.parameters()).detach()


@action(READ, "`torch.cat([p.flatten() ...])`, `torch.stack([p.norm() ...])`")
def params_joined(loop: Loop) -> Any:
    with torch.no_grad():
        params = list(loop.model.parameters())
        return [torch.cat([p.flatten() for p in params]), torch.stack([p.norm() for p in params])]


@action(READ, "`torch._foreach_norm(list(model.parameters()))`")
def params_foreach_norm(loop: Loop) -> Any:
    return list(torch._foreach_norm([p.detach() for p in loop.model.parameters()]))


@action(READ, "`p.isnan().any()`, `torch.equal(p, q)`, `torch.allclose`")
def params_compared(loop: Loop) -> Any:
    weight = loop.model.head.weight
    return [bool(weight.isnan().any()), torch.equal(weight, weight.clone()), torch.allclose(weight, weight + 1)]


@action(READ, "shape, numel, dtype, device, stride, `requires_grad`, `is_leaf`, `isinstance(p, nn.Parameter)`")
def params_facts(loop: Loop) -> Any:
    return [
        [
            *(name, list(p.shape), p.numel(), str(p.dtype), str(p.device), list(p.stride()), p.requires_grad),
            *(p.is_leaf, isinstance(p, nn.Parameter), p.dim(), p.element_size(), p.nbytes, len(p) if p.dim() else 0),
        ]
        for name, p in loop.params()
    ]


@action(READ, "parameters as keys of a dict, `p is q`, `id(p)`")
def params_as_keys(loop: Loop) -> Any:
    names = {p: name for name, p in loop.params()}
    return [names[loop.model.head.weight], loop.model.head.weight is loop.model.get_parameter("head.weight")]


@action(READ, "`p.data_ptr()`: how many distinct tensors there are")
def params_pointers(loop: Loop) -> Any:
    return len({p.data_ptr() for p in loop.model.parameters()})


@action(READ, "`model.state_dict()`")
def state_dict_of_model(loop: Loop) -> Any:
    return {name: value.clone() for name, value in loop.model.state_dict().items()}


@action(READ, "`model.state_dict()` right after `optimizer.step()`")
def state_dict_after_step(loop: Loop) -> Any:
    loop.backward()
    loop.optimizer.step()
    state = {name: value.clone() for name, value in loop.model.state_dict().items()}
    loop.optimizer.zero_grad()
    return state


@action(READ, "`torch.save(model.state_dict(), file)`, `torch.load`")
def state_dict_saved(loop: Loop) -> Any:
    file = io.BytesIO()
    torch.save(loop.model.state_dict(), file)
    file.seek(0)
    return dict(torch.load(file, weights_only=True))


@action(READ, "`if rank == 0: torch.save(model.state_dict(), file)`", composes=False)
def state_dict_saved_on_rank_0(loop: Loop) -> Any:
    if loop.rank == 0:
        torch.save(loop.model.state_dict(), io.BytesIO())


@action(READ, "`if rank == 0: print(p.norm().item())`", composes=False)
def params_logged_on_rank_0(loop: Loop) -> Any:
    if loop.rank == 0:
        print(loop.model.head.weight.norm().item())


@action(READ, "`copy.deepcopy(model)`: a frozen teacher")
def model_copied(loop: Loop) -> Any:
    teacher = copy.deepcopy(loop.model)
    with torch.no_grad():
        return Local(loop.loss(teacher).item())


@action(READ, "`pickle.dumps(model)`, `torch.save(model, file)`")
def model_pickled(loop: Loop) -> Any:
    copied = pickle.loads(pickle.dumps(loop.model))
    with torch.no_grad():
        return Local(loop.loss(copied).item())


@action(READ, "an EMA by hand: a dict of clones, `ema[name].lerp_(p.detach(), 0.1)`")
def ema_by_hand(loop: Loop) -> Any:
    ema = loop.notes.setdefault("ema", {name: torch.zeros(p.shape) for name, p in loop.params()})
    loop.backward()
    loop.update()
    for name, p in loop.params():
        ema[name].lerp_(p.detach(), 0.1)
    return dict(ema)


@action(READ, "`torch.optim.swa_utils.AveragedModel(model)` after `shard`")
def averaged_model(loop: Loop) -> Any:
    averaged = torch.optim.swa_utils.AveragedModel(loop.model)
    loop.backward()
    loop.update()
    averaged.update_parameters(loop.model)
    with torch.no_grad():
        return Local(loop.loss(averaged).item())


def _average_before(loop: Loop) -> None:
    loop.notes["averaged"] = torch.optim.swa_utils.AveragedModel(loop.model)


@action(READ, "`AveragedModel(model)` made before `shard`, updated after it", before=_average_before)
def averaged_model_before(loop: Loop) -> Any:
    loop.backward()
    loop.update()
    averaged = loop.notes["averaged"]
    averaged.update_parameters(loop.model)
    return {name: p.detach().clone() for name, p in averaged.module.named_parameters()}


# -- written ------------------------------------------------------------------------------------------------


@action(WRITE, "`with torch.no_grad(): p.mul_(0.9)`")
def params_scaled(loop: Loop) -> Any:
    with torch.no_grad():
        for p in loop.model.parameters():
            p.mul_(0.9)


@action(WRITE, "`p.data.mul_(0.9)`")
def data_scaled(loop: Loop) -> Any:
    for p in loop.model.parameters():
        p.data.mul_(0.9)


@action(WRITE, "`p.data.apply_(function)`")
def data_applied(loop: Loop) -> Any:
    for p in loop.model.parameters():
        p.data.apply_(lambda value: 0.9 * value)


@action(WRITE, "`p.data = tensor`")
def data_assigned(loop: Loop) -> Any:
    loop.model.head.weight.data = torch.full((VOCAB, WIDTH), 0.05)


@action(WRITE, "`kept = p.data`; `p.data = tensor`; evaluation; `p.data = kept`")
def data_put_back(loop: Loop) -> Any:
    params = list(loop.model.parameters())
    kept = [p.data for p in params]
    for p in params:
        p.data = torch.full_like(p, 0.05)
    with torch.no_grad():
        loss = loop.loss().item()
    kept[0].mul_(0.5)
    norm = kept[0].norm().item()
    for p, data in zip(params, kept, strict=True):
        p.data = data
    return Local(loss), norm


@action(
    WRITE, "`row = p.data[0]`, `p.detach().t()`, ...; `p.data = tensor`: they keep the former values, and share them"
)
def views_kept(loop: Loop) -> Any:
    p = loop.model.head.weight
    row, turned, (_, below) = p.data[0], p.detach().t(), p.data.split([5, 8])
    p.data = torch.full((VOCAB, WIDTH), 0.05)
    row.add_(1)
    below.zero_()
    return row.clone(), turned.clone(), p.detach().clone()


@action(
    WRITE, "`p.data.view_as(q).mul_(0.5)`, `torch.broadcast_tensors(p.data, q)`: views made with a second parameter"
)
def views_of_several(loop: Loop) -> Any:
    p, bias = loop.model.head.weight, loop.model.head.bias
    p.data.view_as(p).mul_(0.5)
    with torch.no_grad():
        _, turned = torch.broadcast_tensors(bias, p.data.t())
        turned[0].fill_(0.3)


@action(WRITE, "`kept = p.data`; `p.data = tensor`; `p.data = kept`; then `kept.mul_(0.5)`, which is `p` again")
def data_put_back_and_written(loop: Loop) -> Any:
    p = loop.model.head.weight
    kept = p.data
    p.data = torch.full((VOCAB, WIDTH), 0.05)
    p.data = kept
    kept.mul_(0.5)


@action(WRITE, "`p.data, q.data = q.data, p.data`, and writing to what they were")
def data_exchanged(loop: Loop) -> Any:
    first, second = (block.up.weight for block in loop.model.blocks)
    mine, other = first.data, second.data
    first.data, second.data = other, mine
    mine.mul_(0.5)


@action(WRITE, "`p.data = tensor`, then `tensor.add_(1)`: in PyTorch a write to the parameter")
def data_assigned_and_written(loop: Loop) -> Any:
    p, flat = loop.model.head.weight, torch.full((VOCAB * WIDTH,), 0.05)
    kept = p.detach().clone()
    p.data = flat.view(VOCAB, WIDTH)
    flat.add_(1)
    try:
        return p.detach().clone()
    finally:
        p.data = kept


@action(WRITE, "`p.data = q.data`: in PyTorch they share memory from then on")
def data_tied(loop: Loop) -> Any:
    first, second = (block.up.weight for block in loop.model.blocks)
    kept = first.detach().clone()
    first.data = second.data
    try:
        loop.loss()
    finally:
        first.data = kept


@action(WRITE, "`p.data.data = tensor`, which changes nothing in PyTorch")
def data_of_data_assigned(loop: Loop) -> Any:
    loop.model.head.weight.data.data = torch.zeros(VOCAB, WIDTH)


@action(WRITE, "`plain.data = p.data` of a parameter that is not sharded")
def data_given_away(loop: Loop) -> Any:
    plain = nn.Parameter(torch.zeros(VOCAB, WIDTH))
    plain.data = loop.model.head.weight.data
    return plain.detach().clone()


@action(WRITE, "`nn.Parameter(p)`, as a second parameter in the same memory")
def second_parameter(loop: Loop) -> Any:
    return nn.Parameter(loop.model.head.weight).norm().item()


@action(WRITE, "`nn.Parameter(p.detach())` in another module, which trains it")
def second_parameter_detached(loop: Loop) -> Any:
    other = nn.Linear(WIDTH, VOCAB)
    other.weight = nn.Parameter(loop.model.head.weight.detach())
    other(torch.ones(1, WIDTH)).sum().backward()
    return other.weight.grad


@action(WRITE, "`p.unsqueeze_(0)`, `p.t_()`: another shape in place", composes=False)
def shape_changed(loop: Loop) -> Any:
    with torch.no_grad():
        loop.model.head.weight.unsqueeze_(0)


@action(WRITE, "`p.set_(tensor)`", composes=False)
def memory_set(loop: Loop) -> Any:
    with torch.no_grad():
        loop.model.head.weight.set_(torch.full((VOCAB, WIDTH), 0.1))


@action(WRITE, "`p.data.copy_(tensor)`, `p.copy_(tensor)` under `no_grad`")
def params_copied_to(loop: Loop) -> Any:
    loop.model.head.weight.data.copy_(torch.full((VOCAB, WIDTH), 0.1))
    with torch.no_grad():
        loop.model.head.bias.copy_(torch.arange(VOCAB) / VOCAB)


@action(WRITE, "`p.clamp_(-0.2, 0.2)` under `no_grad` (WGAN)")
def params_clamped(loop: Loop) -> Any:
    with torch.no_grad():
        for p in loop.model.parameters():
            p.clamp_(-0.2, 0.2)


@action(WRITE, "`model.embed.weight[0] = 0`, `p[0].zero_()`, `p.data[1].fill_(1)`")
def rows_written(loop: Loop) -> Any:
    with torch.no_grad():
        loop.model.embed.weight[0] = 0
        loop.model.head.weight[0].zero_()
        loop.model.head.bias.data[1:2].fill_(0.5)


@action(WRITE, "`p.div_(p.norm(dim=1, keepdim=True))`: rows of length one")
def rows_normalized(loop: Loop) -> Any:
    with torch.no_grad():
        weight = loop.model.embed.weight
        weight.div_(weight.norm(dim=1, keepdim=True))


@action(WRITE, "`torch._foreach_mul_(list(model.parameters()), 0.9)`")
def params_foreach(loop: Loop) -> Any:
    with torch.no_grad():
        torch._foreach_mul_(list(loop.model.parameters()), 0.9)


@action(WRITE, "`F.batch_norm(x, p, q, training=True)`: running statistics that are parameters")
def params_as_statistics(loop: Loop) -> Any:
    mean, var = loop.model.offset, loop.model.blocks[0].norm.weight
    rows = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
    with torch.no_grad():
        F.batch_norm(rows, mean, var, training=True)
        torch.native_batch_norm(rows, None, None, mean, var, True, 0.1, 1e-5)
        return F.instance_norm(rows.t()[None], mean, var)


@action(WRITE, "`F.embedding(rows, p, max_norm=...)`, `F.embedding_bag(...)`")
def params_renormalized(loop: Loop) -> Any:
    with torch.no_grad():
        F.embedding(torch.arange(3), loop.model.embed.weight, max_norm=0.5)
        return F.embedding_bag(torch.arange(4)[None], loop.model.embed.weight, max_norm=0.4)


@action(WRITE, "`torch.mul(a, b, out=p)`, `torch._foreach_copy_(params, tensors)`")
def params_as_results(loop: Loop) -> Any:
    up, down = loop.model.blocks[0].up.bias, loop.model.blocks[0].down.bias
    with torch.no_grad():
        torch.mul(up, 0.9, out=up)
        torch._foreach_copy_([down, loop.model.head.bias], [torch.ones(WIDTH) / 8, torch.ones(VOCAB) / 4])


@action(WRITE, "`p.add_(...)` with another value on every rank: rank 0's counts")
def params_written_unlike(loop: Loop) -> Any:
    with torch.no_grad():
        loop.model.head.weight.add_(0.01 * (1 + loop.rank))


@action(WRITE, "`p.mul_(0.9)` with gradients enabled, which torch refuses")
def params_written_with_grad(loop: Loop) -> Any:
    try:
        loop.model.head.weight.mul_(0.9)
    except RuntimeError:
        return "refused"
    return "accepted"


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.1, generator=torch.Generator().manual_seed(module.in_features))
        nn.init.zeros_(module.bias)


@action(WRITE, "`model.apply(init)`, `nn.init.normal_(p)`")
def apply_init(loop: Loop) -> Any:
    loop.model.apply(_initialize)


@action(WRITE, "`module.reset_parameters()`")
def reset_parameters(loop: Loop) -> Any:
    loop.model.blocks[0].norm.reset_parameters()


@action(WRITE, "`model.load_state_dict(state)`")
def load_state_dict(loop: Loop) -> Any:
    state = {name: torch.full(value.shape, 0.1) + 0.01 * value.dim() for name, value in loop.model.state_dict().items()}
    state["temperature"] = torch.tensor(1.0)
    return sorted(loop.model.load_state_dict(state).missing_keys)


@action(WRITE, "`model.load_state_dict(part, strict=False)`")
def load_part(loop: Loop) -> Any:
    found = loop.model.load_state_dict({"head.bias": torch.ones(VOCAB) / 2}, strict=False)
    return len(found.missing_keys)


@action(WRITE, "`model.load_state_dict(state, assign=True)`")
def load_assigned(loop: Loop) -> Any:
    state = {name: torch.full(p.shape, 0.1) for name, p in loop.model.head.named_parameters()}
    loop.model.head.load_state_dict(state, assign=True)


@action(WRITE, "`model.head.load_state_dict(state)`: a part")
def load_head(loop: Loop) -> Any:
    loop.model.head.load_state_dict({"weight": torch.full((VOCAB, WIDTH), 0.07), "bias": torch.zeros(VOCAB)})


@action(WRITE, "`model.load_state_dict(kept state_dict())`: back to earlier values")
def rolled_back(loop: Loop) -> Any:
    kept = {name: value.clone() for name, value in loop.model.state_dict().items()}
    loop.backward()
    loop.update()
    loop.model.load_state_dict(kept)


@action(WRITE, "`vector_to_parameters(vector, model.parameters())`")
def vector_to_params(loop: Loop) -> Any:
    with torch.no_grad():
        vector = nn.utils.parameters_to_vector(loop.model.parameters())
        nn.utils.vector_to_parameters(vector * 0.9, loop.model.parameters())


@action(WRITE, "EMA weights swapped in for an evaluation, and back")
def ema_swapped(loop: Loop) -> Any:
    with torch.no_grad():
        kept = {name: p.detach().clone() for name, p in loop.params()}
        for p in loop.model.parameters():
            p.data.copy_(p.data * 0.5)
        loss = loop.loss().item()
        for name, p in loop.params():
            p.data.copy_(kept[name])
    return Local(loss)


@action(WRITE, "`p.normal_()` between forward and backward, of a parameter that backward needs")
def written_before_backward(loop: Loop) -> Any:
    loss = loop.loss()
    try:
        with torch.no_grad():
            loop.model.head.weight.mul_(1.5)
        loss.backward()
    except RuntimeError:
        return "refused"
    finally:
        loop.optimizer.zero_grad()
    return "accepted"


@action(WRITE, "`p.data.mul_(1.5)`, `p.data[0] = 0` between forward and backward: the backward takes the new values")
def data_written_before_backward(loop: Loop) -> Any:
    loss = loop.loss()
    loop.model.head.weight.data.mul_(1.5)
    loop.model.blocks[0].up.weight.data[0] = 0
    loss.backward()
    loop.update()
    return Local(loss.item())


@action(WRITE, "`p.data = tensor` between forward and backward: in PyTorch the backward takes the former values")
def data_assigned_before_backward(loop: Loop) -> Any:
    loss, kept = loop.loss(), loop.model.head.weight.detach().clone()
    loop.model.head.weight.data = torch.full((VOCAB, WIDTH), 0.05)
    try:
        loss.backward()
    finally:
        loop.model.head.weight.data = kept
    loop.update()
    return Local(loss.item())


@action(WRITE, "weights exchanged for an evaluation between forward and backward: `p.data = tensor`, `p.data = kept`")
def data_put_back_before_backward(loop: Loop) -> Any:
    loss, p = loop.loss(), loop.model.head.weight
    kept, p.data = p.data, torch.full((VOCAB, WIDTH), 0.05)
    with torch.no_grad():
        evaluated = loop.loss().item()
    p.data = kept
    loss.backward()
    loop.update()
    return Local([loss.item(), evaluated])


# -- losses -------------------------------------------------------------------------------------------------


def losing(name: str, about: str, term: Any) -> None:
    """Take a step on a loss to which the loop adds its own term."""

    def act(loop: Loop) -> Any:
        loss = loop.loss() + term(loop)
        loss.backward()
        loop.update()
        return Local(loss.item())

    act.__name__ = name
    action(LOSS, about)(act)


losing(
    "l2_term",
    "`+ 0.1 * sum(p.pow(2).sum() for p in model.parameters())`",
    lambda loop: 0.1 * sum(p.pow(2).sum() for p in loop.model.parameters()),
)
losing("l1_term", "`+ 0.1 * model.head.weight.abs().mean()`", lambda loop: 0.1 * loop.model.head.weight.abs().mean())
losing(
    "term_of_unused",
    "`+ model.spare.weight.pow(2).sum()`, of a parameter that the forward does not use",
    lambda loop: loop.model.spare.weight.pow(2).sum(),
)
losing(
    "orthogonality_term",
    "`+ (w @ w.T - eye).norm()`",
    lambda loop: (loop.model.spare.weight @ loop.model.spare.weight.T - torch.eye(WIDTH)).norm(),
)


@action(LOSS, "an L2 term computed before the forward")
def term_before_forward(loop: Loop) -> Any:
    term = 0.1 * sum(p.pow(2).sum() for p in loop.model.parameters())
    loss = loop.loss() + term
    loss.backward()
    loop.update()
    return Local(loss.item())


@action(LOSS, "a proximal term: `(p - start).pow(2)`, of values kept before")
def proximal_term(loop: Loop) -> Any:
    kept = [p.detach().clone() * 0.9 for p in loop.model.parameters()]
    loss = loop.loss() + sum((p - k).pow(2).sum() for p, k in zip(loop.model.parameters(), kept, strict=True))
    loss.backward()
    loop.update()
    return Local(loss.item())


@action(LOSS, "`model(x) * model.logit_scale.exp()` (CLIP)")
def logit_scale(loop: Loop) -> Any:
    loss = loop.loss(lambda x: loop.model(x) * loop.model.logit_scale.exp())
    loss.backward()
    loop.update()
    return Local(loss.item())


@action(LOSS, "`F.linear(model.features(x), model.embed.weight)`: a weight used by the loop")
def head_in_the_loop(loop: Loop) -> Any:
    loss = loop.loss(lambda x: F.linear(loop.model.features(x), loop.model.embed.weight))
    loss.backward()
    loop.update()
    return Local(loss.item())


@action(LOSS, "`F.linear(model.features(x), p.detach())`: a weight that stays, of an input that trains")
def frozen_head_in_the_loop(loop: Loop) -> Any:
    loss = loop.loss(lambda x: F.linear(loop.model.features(x), loop.model.head.weight.detach()))
    loss.backward()
    loop.update()
    return Local(loss.item())


@action(
    LOSS, "the same weight as a buffer of a module of the loop's: `nn.Buffer(p.detach())`, `nn.Parameter(..., False)`"
)
def frozen_head_in_a_module(loop: Loop) -> Any:
    head = nn.Linear(WIDTH, VOCAB, bias=False)
    head.weight = nn.Parameter(loop.model.head.weight.detach(), requires_grad=False)
    head.shift = nn.Buffer(loop.model.head.bias.detach())
    loss = loop.loss(lambda x: head(loop.model.features(x)) * head.shift)
    loss.backward()
    loop.update()
    return Local(loss.item())


@action(LOSS, "`model.forward(x)`, not `model(x)`")
def forward_called(loop: Loop) -> Any:
    loss = loop.loss(loop.model.forward)
    loss.backward()
    loop.update()
    return Local(loss.item())


@action(LOSS, "submodules called one by one, not `model(x)`")
def parts_called(loop: Loop) -> Any:
    def forward(x: torch.Tensor) -> torch.Tensor:
        hidden = loop.model.embed(x)
        for block in loop.model.blocks:
            hidden = block(hidden)
        return loop.model.head(hidden)

    loss = loop.loss(forward)
    loss.backward()
    loop.update()
    return Local(loss.item())


@action(LOSS, "`model(x)` with gradients enabled and no backward: a loss that is only looked at")
def looked_at(loop: Loop) -> Any:
    return Local(loop.loss().item())


@action(LOSS, "the same, and then `model.load_state_dict(...)`")
def looked_at_and_loaded(loop: Loop) -> Any:
    other = {
        name: value * 0.9 if value.is_floating_point() else value for name, value in loop.model.state_dict().items()
    }
    first = loop.loss().item()
    loop.model.load_state_dict(other)
    loss = loop.backward()
    loop.update()
    return Local(first), Local(loss.item())


@action(LOSS, "the same, and then `p.copy_(tensor)` under `no_grad`")
def looked_at_and_copied(loop: Loop) -> Any:
    other = {name: 0.9 * p.detach().clone() for name, p in loop.params()}
    first = loop.loss().item()
    with torch.no_grad():
        for name, p in loop.params():
            p.copy_(other[name])
    loss = loop.backward()
    loop.update()
    return Local(first), Local(loss.item())


@action(LOSS, "`model(x)` looked at between backward and step, with gradients enabled")
def looked_at_before_step(loop: Loop) -> Any:
    loss = loop.backward()
    second = loop.loss().item()
    loop.update()
    return Local(loss.item()), Local(second), Local(loop.loss().item())


@action(LOSS, "only `model.head(features)`, of features computed without gradients (a probe)")
def probe(loop: Loop) -> Any:
    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            hidden = loop.model.features(x)
        return loop.model.head(hidden)

    loss = loop.loss(forward)
    loss.backward()
    loop.update()
    return Local(loss.item())


@action(LOSS, "a loss of NaN: backward, the step taken")
def nan_loss(loop: Loop) -> Any:
    kept = {name: p.detach().clone() for name, p in loop.params()}
    (loop.loss() * float("nan")).backward()
    norm = loop.clip(1.0)
    loop.optimizer.zero_grad()
    return norm, [torch.equal(kept[name], p) for name, p in loop.params()]


@action(LOSS, "`loss / 0`: infinite gradients, looked at and dropped")
def infinite_loss(loop: Loop) -> Any:
    (loop.loss() / 0).backward()
    finite = loop.model.head.weight.grad.isfinite().all().item()
    loop.optimizer.zero_grad()
    return finite


@action(LOSS, "`if loss.isnan(): continue`: a forward whose loss is dropped")
def forward_dropped(loop: Loop) -> Any:
    loss = loop.loss()
    return Local(loss.item())


# -- autograd -----------------------------------------------------------------------------------------------


@action(GRAD, "several forwards, their losses added, one backward")
def several_forwards(loop: Loop) -> Any:
    (loop.loss() + loop.loss() + loop.loss()).backward()
    loop.update()


@action(GRAD, "three forwards, then three backwards")
def forwards_then_backwards(loop: Loop) -> Any:
    losses = [loop.loss() for _ in range(3)]
    for loss in losses:
        loss.backward()
    loop.update()


@action(GRAD, "three forwards, then three backwards in the other order")
def backwards_reversed(loop: Loop) -> Any:
    losses = [loop.loss() for _ in range(3)]
    for loss in reversed(losses):
        loss.backward()
    loop.update()


@action(GRAD, "`loss.backward(retain_graph=True)`, and again")
def retain_graph(loop: Loop) -> Any:
    loss = loop.loss()
    loss.backward(retain_graph=True)
    loss.backward()
    loop.update()


@action(GRAD, "`loss.backward()` twice without `retain_graph`, which torch refuses")
def backward_twice(loop: Loop) -> Any:
    loss = loop.loss()
    loss.backward()
    try:
        loss.backward()
    except RuntimeError:
        return "refused"
    finally:
        loop.optimizer.zero_grad()
    return "accepted"


@action(GRAD, "`torch.autograd.backward([a, b])`")
def backward_of_two(loop: Loop) -> Any:
    torch.autograd.backward([loop.loss(), loop.loss()])
    loop.update()


@action(GRAD, "`losses.backward(gradient=weights)`")
def backward_of_vector(loop: Loop) -> Any:
    losses = torch.stack([loop.loss(), loop.loss()])
    losses.backward(gradient=torch.tensor([0.3, 0.7]))
    loop.update()


@action(GRAD, "`loss.backward(inputs=[p])`: one parameter only")
def backward_inputs(loop: Loop) -> Any:
    loop.loss().backward(inputs=[loop.model.head.weight, loop.model.head.bias])
    loop.update()


@action(GRAD, "`torch.autograd.grad(loss, params)`, to look at")
def autograd_grad(loop: Loop) -> Any:
    params = [loop.model.head.weight, loop.model.blocks[0].up.weight, loop.model.embed.weight]
    return Local([grad.clone() for grad in torch.autograd.grad(loop.loss(), params)])


@action(GRAD, "`torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)`")
def autograd_grad_of_all(loop: Loop) -> Any:
    params = [p for p in loop.model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loop.loss(), params, allow_unused=True)
    return Local([grad.clone() if grad is not None else 0.0 for grad in grads])


@action(GRAD, "`p.grad = g` of `torch.autograd.grad`, then a step")
def autograd_grad_assigned(loop: Loop) -> Any:
    params = [loop.model.head.weight, loop.model.embed.weight]
    for p, grad in zip(params, torch.autograd.grad(loop.loss(), params), strict=True):
        p.grad = grad
    loop.update()


@action(GRAD, "`torch.autograd.grad(loss, hidden)`: of an activation")
def autograd_grad_of_activation(loop: Loop) -> Any:
    def norm(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = loop.model.features(x)
        loss = F.cross_entropy(loop.model.head(hidden).flatten(0, 1), y.flatten())
        return torch.autograd.grad(loss, hidden)[0].norm()

    return Local(loop.mean(norm).item())


@action(GRAD, "a gradient penalty: `autograd.grad(loss, hidden, create_graph=True)`, then backward")
def penalty_on_activation(loop: Loop) -> Any:
    def penalized(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = loop.model.features(x)
        loss = F.cross_entropy(loop.model.head(hidden).flatten(0, 1), y.flatten())
        (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
        return loss + grad.pow(2).sum()

    loss = loop.mean(penalized)
    loss.backward()
    loop.update()
    return Local(loss.item())


@action(GRAD, "double backward: `autograd.grad(loss, params, create_graph=True)`, its norm sent back")
def penalty_on_params(loop: Loop) -> Any:
    def penalized(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(loop.model, x, y)
        grads = torch.autograd.grad(loss, [loop.model.head.weight, loop.model.blocks[0].up.weight], create_graph=True)
        return loss + sum(grad.pow(2).sum() for grad in grads)

    loss = loop.mean(penalized)
    loss.backward()
    loop.update()
    return Local(loss.item())


@action(GRAD, "MAML: `functional_call` with `p - lr * autograd.grad(..., create_graph=True)`, sent back")
def maml(loop: Loop) -> Any:
    def of_learned(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        head = dict(loop.model.head.named_parameters(prefix="head"))
        grads = torch.autograd.grad(cross_entropy(loop.model, x, y), list(head.values()), create_graph=True)
        fast = {name: p - 0.1 * grad for (name, p), grad in zip(head.items(), grads, strict=True)}
        return cross_entropy(lambda x: torch.func.functional_call(loop.model, fast, (x,)), x, y)

    loss = loop.mean(of_learned)
    loss.backward()
    loop.update()
    return Local(loss.item())


@action(GRAD, "a Hessian times a vector: `autograd.grad` of `autograd.grad`")
def hessian_vector(loop: Loop) -> Any:
    params = [loop.model.head.weight, loop.model.blocks[0].up.weight]
    grads = torch.autograd.grad(loop.loss(), params, create_graph=True)
    products = torch.autograd.grad(sum(grad.sum() for grad in grads), params)
    return Local([product.clone() for product in products])


@action(GRAD, "a backward through a forward of before the step, which torch refuses")
def backward_of_before_step(loop: Loop) -> Any:
    first, second = loop.loss(), loop.loss()
    first.backward()
    loop.update()
    said = ""
    try:
        second.backward()
    except RuntimeError as error:
        said = str(error)
    loop.model.zero_grad()
    return "has been modified by an inplace operation" in said


@action(GRAD, "`p.mul_(0.9)` between a use of `p`, or of `p.detach()`, by the loop and backward, which torch refuses")
def used_and_written(loop: Loop) -> Any:
    said = []
    for weight in (loop.model.head.weight, loop.model.head.weight.detach()):
        x = torch.ones(1, WIDTH, requires_grad=True)
        out = F.linear(x, weight).pow(2).sum()
        with torch.no_grad():
            loop.model.head.weight.mul_(0.9)
        try:
            out.backward()
        except RuntimeError as error:
            said.append("has been modified by an inplace operation" in str(error))
    loop.model.zero_grad()
    return said


@action(GRAD, "`torch.utils.checkpoint` around a function of the loop's that reads `p` and `q.detach()`")
def checkpointed_use(loop: Loop) -> Any:
    def head(hidden: torch.Tensor) -> torch.Tensor:
        shifted = hidden * loop.model.blocks[0].norm.weight.detach()
        return F.linear(shifted, loop.model.head.weight).pow(2)

    loss = loop.loss(lambda x: checkpoint(head, loop.model.features(x), use_reentrant=False))
    loss.backward()
    loop.update()
    return Local(loss.item())


@action(GRAD, "`p.detach().requires_grad_()`: a leaf that has a gradient of its own")
def own_leaf(loop: Loop) -> Any:
    weight = loop.model.head.weight.detach().requires_grad_()
    (weight * 2).sum().backward()
    return weight.grad


@action(GRAD, "`torch.autograd.functional.jacobian(function, p)`, which makes such a leaf")
def jacobian_of_param(loop: Loop) -> Any:
    return torch.autograd.functional.jacobian(lambda p: p.pow(2).sum(), loop.model.head.weight)


class Recomputed(torch.autograd.Function):
    """A part of a model whose backward computes it again, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, part: nn.Module, x: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        ctx.part = part
        ctx.save_for_backward(x, *params)
        with torch.no_grad():
            return part(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, *params = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return None, *torch.autograd.grad(ctx.part(x), (x, *params), grad)


@action(GRAD, "an `autograd.Function` that is given parameters, and calls their module again in its backward")
def recomputed_by_function(loop: Loop) -> Any:
    head = loop.model.head
    loss = loop.loss(lambda x: Recomputed.apply(head, loop.model.features(x), *head.parameters()))
    loss.backward()
    loop.update()
    return Local(loss.item())


@action(GRAD, "`loss.backward(create_graph=True)`", composes=False)
def backward_create_graph(loop: Loop) -> Any:
    loop.loss().backward(create_graph=True)
    loop.optimizer.step()
    loop.optimizer.zero_grad()


@action(GRAD, "`torch.func.functional_call(model, params, x)` with other values")
def functional_call(loop: Loop) -> Any:
    params = {name: torch.full(p.shape, 0.1) for name, p in loop.params()}
    with torch.no_grad():
        return Local(loop.loss(lambda x: torch.func.functional_call(loop.model, params, (x,))).item())


@action(GRAD, "`functional_call(model, dict(model.named_parameters()), x)`, then backward")
def functional_call_of_own(loop: Loop) -> Any:
    params = dict(loop.model.named_parameters())
    loss = loop.loss(lambda x: torch.func.functional_call(loop.model, params, (x,)))
    loss.backward()
    loop.update()
    return Local(loss.item())


@action(GRAD, "`torch.func.grad` over `functional_call`")
def func_grad(loop: Loop) -> Any:
    params = {name: p.detach() for name, p in loop.params()}

    def grad(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
            return cross_entropy(lambda x: torch.func.functional_call(loop.model, values, (x,)), x, y)

        return torch.func.grad(loss)(params)["head.weight"]

    return Local(loop.mean(grad))


class _AnomalyDetection:
    """`torch.autograd.detect_anomaly` for ranks that are threads, although its setting belongs to the process.

    If each thread restored the setting that it found, one could leave it wrong, or switch it off while others still
    need it. So the first thread switches it on, the last one switches it off, and none leaves before.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_inside = 0

    def __enter__(self) -> None:
        with self._changed:
            self._num_inside += 1
            torch.autograd.set_detect_anomaly(True, check_nan=True)

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._num_inside -= 1
            if not self._num_inside:
                torch.autograd.set_detect_anomaly(False)
                self._changed.notify_all()
            elif not self._changed.wait_for(lambda: not self._num_inside, timeout=PATIENCE):
                raise TimeoutError("Another rank has stayed within detect_anomaly().")


_detects_anomalies = _AnomalyDetection()


@action(GRAD, "`torch.autograd.detect_anomaly()`")
def detect_anomaly(loop: Loop) -> Any:
    with _detects_anomalies:
        loss = loop.backward()
    loop.update()
    return Local(loss.item())


@action(GRAD, "`torch.utils.checkpoint` in the loop")
def checkpointed(loop: Loop) -> Any:
    def forward(x: torch.Tensor) -> torch.Tensor:
        hidden = loop.model.embed(x)
        for block in loop.model.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return loop.model.head(hidden)

    loss = loop.loss(forward)
    loss.backward()
    loop.update()
    return Local(loss.item())


@action(GRAD, "`torch.autograd.graph.save_on_cpu()`, saved-tensor hooks")
def saved_tensors(loop: Loop) -> Any:
    with torch.autograd.graph.save_on_cpu():
        loss = loop.loss()
    loss.backward()
    loop.update()
    return Local(loss.item())


@action(GRAD, "`torch.set_grad_enabled(False)` around a forward")
def grad_disabled(loop: Loop) -> Any:
    with torch.set_grad_enabled(False):
        loss = loop.loss()
    return Local(loss.item())


@action(GRAD, '`torch.autocast("cpu", torch.bfloat16)` around the forward')
def autocast(loop: Loop) -> Any:
    # The twin's two forwards would share cached casts, and so round the sum of two gradients instead of each.
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        loss = loop.loss()
    loss.backward()
    loop.update()
    return Local(loss.item())


def _scaled_step(loop: Loop, scaler: Any, loss: torch.Tensor, limit: float | None = None) -> None:
    scaler.scale(loss).backward()
    if limit is not None:
        scaler.unscale_(loop.optimizer)
        nn.utils.clip_grad_norm_(loop.model.parameters(), limit)
    scaler.step(loop.optimizer)
    scaler.update()
    loop.optimizer.zero_grad()


@action(GRAD, "`GradScaler`: scale, backward, step, update", composes=False)
def grad_scaler(loop: Loop) -> Any:
    scaler = loop.notes.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=1024.0))
    _scaled_step(loop, scaler, loop.loss())
    return scaler.get_scale()


@action(GRAD, "`GradScaler` with `unscale_` and clipping", composes=False)
def grad_scaler_clips(loop: Loop) -> Any:
    scaler = loop.notes.setdefault("clipping scaler", torch.amp.GradScaler("cpu", init_scale=1024.0))
    _scaled_step(loop, scaler, loop.loss(), limit=0.1)
    return scaler.get_scale()


@action(GRAD, "`GradScaler` on infinite gradients: the step is left out", composes=False)
def grad_scaler_skips(loop: Loop) -> Any:
    scaler = loop.notes.setdefault("skipping scaler", torch.amp.GradScaler("cpu", init_scale=1024.0))
    _scaled_step(loop, scaler, loop.loss() * float("inf"))
    return scaler.get_scale()


# -- evaluation ---------------------------------------------------------------------------------------------


@action(EVAL, "`model.eval()`, `torch.inference_mode()`, `model.train()`")
def inference_mode(loop: Loop) -> Any:
    loop.model.eval()
    with torch.inference_mode():
        loss = loop.loss().item()
    loop.model.train()
    return Local(loss)


@action(EVAL, "an evaluation between backward and step")
def evaluated_before_step(loop: Loop) -> Any:
    loop.backward()
    with torch.no_grad():
        loss = loop.loss().item()
    loop.update()
    return Local(loss)


@action(EVAL, "an evaluation between forward and backward")
def evaluated_before_backward(loop: Loop) -> Any:
    loss = loop.loss()
    with torch.no_grad():
        other = loop.loss().item()
    loss.backward()
    loop.update()
    return Local(other)


@action(EVAL, "an evaluation with uneven batches: rank 0 has one more", composes=False)
def uneven_evaluation(loop: Loop) -> Any:
    with torch.no_grad():
        losses = [loop.loss().item() for _ in range(2)]
        extra = loop.batch()
        if loop.rank == 0:
            for x, y in extra:
                cross_entropy(loop.model, x, y)
    return Local(losses)


@action(EVAL, "an evaluation on rank 0 only", composes=False)
def evaluation_on_rank_0(loop: Loop) -> Any:
    batch = loop.batch()
    with torch.no_grad():
        if loop.rank == 0:
            loop.loss(batch=batch).item()


@action(EVAL, "an evaluation of a submodule: `model.blocks[0](hidden)`")
def part_evaluated(loop: Loop) -> Any:
    with torch.no_grad():
        return loop.model.blocks[0](torch.ones(1, 2, WIDTH))


# -- errors -------------------------------------------------------------------------------------------------


class _Interrupted(Exception):
    """An exception that a loop's own code raises."""


@action(ERROR, "an exception in the forward, caught; training goes on")
def error_in_forward(loop: Loop) -> Any:
    def fail(*_: Any) -> None:
        raise _Interrupted("in the forward")

    handle = loop.model.blocks[1].register_forward_hook(fail)
    caught = False
    try:
        loop.backward()
    except _Interrupted:
        caught = True
    finally:
        handle.remove()
    loop.optimizer.zero_grad()
    return caught


@action(ERROR, "an exception in the backward, caught; training goes on")
def error_in_backward(loop: Loop) -> Any:
    def fail(grad: torch.Tensor) -> None:
        raise _Interrupted("in the backward")

    def failing(x: torch.Tensor) -> torch.Tensor:
        hidden = loop.model.embed(x)
        hidden = loop.model.blocks[0](hidden)
        hidden.register_hook(fail)
        return loop.model.head(loop.model.blocks[1](hidden))

    caught = False
    try:
        loop.loss(failing).backward()
    except _Interrupted:
        caught = True
    loop.optimizer.zero_grad()
    return caught


@action(ERROR, "an exception in the second micro-batch, caught; both are dropped")
def error_between_micro_batches(loop: Loop) -> Any:
    loop.backward()
    try:
        error_in_forward_once(loop)
    except _Interrupted:
        loop.optimizer.zero_grad()
    loop.backward()
    loop.update()


def error_in_forward_once(loop: Loop) -> None:
    def fail(*_: Any) -> None:
        raise _Interrupted("in the second micro-batch")

    handle = loop.model.head.register_forward_pre_hook(fail)
    try:
        loop.backward()
    finally:
        handle.remove()


@action(ERROR, "a wrong shape in the forward (`RuntimeError` of torch), caught")
def wrong_shape(loop: Loop) -> Any:
    try:
        loop.model.head(torch.ones(2, WIDTH + 1))
    except RuntimeError:
        return "caught"
    return "accepted"


__all__: list[str] = []
