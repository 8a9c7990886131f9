"""The private parts of PyTorch, and of other libraries, that the source uses. When a new version of torch has lost one,
these tests say which, and what for; a use that is on no list is found.

What is imported is in `system/torch_private.py`, and what concerns communication in `comm/compat.py`. Here is the rest:
attributes of torch's objects, which are used where they stand, and a class of DCP's file format.
"""

from __future__ import annotations

import ast
import importlib
import re
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.comm import compat
from shardwise.system import torch_private

SOURCE = Path(shardwise.__file__).parent
SEAMS = ("system/torch_private.py", "comm/compat.py", "comm/transport/gloo_abort.py")
"""Modules that exist to use private parts, each with its reasons."""


def hooked() -> torch.Tensor:
    param = nn.Parameter(torch.ones(1))
    param.register_post_accumulate_grad_hook(lambda _: None)
    return param


def stepped_in_backward() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it imports is scripted
        from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward

    param = nn.Parameter(torch.ones(1))
    _apply_optimizer_in_backward(torch.optim.SGD, [param], {"lr": 1.0})
    return param


def wrapped() -> nn.Module:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    finally:
        dist.destroy_process_group()


def scheduler() -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)], lr=1.0), 1)


def step_of_a_scheduled_optimizer() -> Any:
    return scheduler().optimizer.step


def stepped_optimizer() -> torch.optim.Optimizer:
    optimizer = scheduler().optimizer
    optimizer.step()
    return optimizer


def chain() -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ChainedScheduler([scheduler()])


def fake_param() -> torch.Tensor:
    with torch_private.FakeTensorMode():
        return nn.Parameter(torch.ones(1))


def compiled() -> Any:
    return torch.compile(nn.Identity(), backend="eager")


def compiled_forward() -> Any:
    return torch.compile(nn.Identity(), backend="eager").forward


MODULE, TENSOR, OPERATOR = nn.BatchNorm1d(1), torch.ones(1), torch.ops.aten.add_.Tensor
OF_TORCH: dict[str, tuple[Any, str]] = {
    # modules: what register_buffer, named_parameters, ... do not do, which is to replace one entry and keep its order
    "_parameters": (MODULE, "parameters are replaced in the module that owns them, also where a property hides them"),
    "_buffers": (MODULE, "buffers are replaced by others of the same name and order"),
    "_modules": (MODULE, "layers of other stages become placeholders"),
    "_non_persistent_buffers_set": (MODULE, "buffers that no state dict has are not expected in a checkpoint"),
    "_forward_hooks": (MODULE, "hooks of the user's are found, which stages or rehearsals would leave out"),
    "_backward_pre_hooks": (MODULE, "hooks of the user's are found, which run only where a stage is"),
    "_forward_pre_hooks": (MODULE, "hooks of the user's are found, which rehearsals would leave out"),
    "_compiled_call_impl": (MODULE, "whether module.compile() was called"),
    "_call_impl": (MODULE, "an elastic session calls the model in place of module()"),
    "_BatchNorm": (nn.modules.batchnorm, "the common class of batch norms, to refuse or synchronize them"),
    "_check_non_zero_input_channels": (nn.SyncBatchNorm, "refuses what torch's own forward refuses, in its words"),
    "_NormBase": (nn.modules.batchnorm, "the common class of norms with running statistics"),
    "_DropoutNd": (nn.modules.dropout, "the common class of dropouts, whose random numbers ranks must share"),
    # tensors
    "_version": (TENSOR, "a write in place to what is kept or sent is noticed"),
    "_base": (
        TENSOR,
        "a write to what was assigned to a parameter in part, and a parameter's view that is returned, are noticed",
    ),
    "_backward_hooks": (TENSOR, "hooks on gradients that are there before shard() are told what they get"),
    "_is_view": (torch.Tensor, "a question about a parameter at rest that needs no values"),
    "_typed_storage": (torch.Tensor, "the older of two ways to a storage, which is refused like the other"),
    "_make_wrapper_subclass": (
        torch.Tensor,
        "tensors without memory of their own: split logits, parameters at rest, weights in codes",
    ),
    "_comm_hooks": (wrapped, "hooks of the user's that send gradients, to say what a plan has instead"),
    "_post_accumulate_grad_hooks": (hooked, "hooks of the user's that would run on gradients that are not there"),
    "_in_backward_optimizers": (stepped_in_backward, "optimizers that would step on gradients of one rank alone"),
    "_has_compatible_shallow_copy_type": (torch, "module.to() asks it of parameters; it needs no values"),
    # operators
    "_unsafe_view": (torch.ops.aten, "what a linear layer makes of its product, which rehearsals call oftenest"),
    "_log_softmax": (torch.ops.aten, "most losses, whose shapes rehearsals compute"),
    "_log_softmax_backward_data": (torch.ops.aten, "its backward"),
    "_softmax_backward_data": (torch.ops.aten, "the backward of a router of experts, likewise"),
    "_to_copy": (torch.ops.aten, "a move or a conversion of a weight in codes, which stays one"),
    "_schema": (OPERATOR, "which arguments an operator writes to"),
    "_overloadname": (OPERATOR, "operators are told apart by name and overload"),
    "_overloadpacket": (OPERATOR, "an operator is recognised in all of its overloads"),
    "_foreach_copy_": (torch, "many small copies are one call"),
    "_foreach_mul_": (torch, "gradients are clipped in one call"),
    "_foreach_norm": (torch, "the squares of many gradients are one call"),
    "_amp_foreach_non_finite_check_and_unscale_": (torch, "GradScaler's; writes without counting a version"),
    "_fused_adam_": (torch, "Adam on the host in one pass over memory; writes without counting a version"),
    "_fused_adamw_": (torch, "AdamW on the host in one pass over memory; writes without counting a version"),
    "_fused_sgd_": (torch, "writes without counting a version"),
    "_fused_adagrad_": (torch, "writes without counting a version"),
    "_assert_async": (torch, "labels are checked without waiting for the device"),
    "_grouped_mm": (torch.ops.aten, "experts' products, which fake tensors do not support"),
    "_native_multi_head_attention": (torch, "a fused path of nn.MultiheadAttention that sees no shards of a sequence"),
    "_transformer_encoder_layer_fwd": (torch, "a fused path of nn.TransformerEncoder that sees none either"),
    "_scaled_dot_product_flash_attention": (torch.ops.aten, "a block of ring attention, with its log-sum-exp"),
    "_scaled_dot_product_flash_attention_backward": (torch.ops.aten, "its backward, from the sum over all blocks"),
    "_scaled_dot_product_flash_attention_for_cpu": (torch.ops.aten, "the same on the CPU"),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (torch.ops.aten, "the same on the CPU"),
    # optimizers and schedulers
    "_optimizer_step_pre_hooks": (torch.optim.SGD([TENSOR]), "hooks of the user's run in order around our step"),
    "_optimizer_step_post_hooks": (torch.optim.SGD([TENSOR]), "hooks of the user's run in order around our step"),
    "_step_count": (scheduler, "a skipped step is no step for a scheduler"),
    "_opt_called": (
        stepped_optimizer,
        "a scheduler warns of its step before the first one that this rank takes itself",
    ),
    "_wrapped_by_lr_sched": (step_of_a_scheduled_optimizer, "a scheduler's mark on step(), which it looks for again"),
    "_schedulers": (chain, "schedulers inside of a scheduler are put back too"),
    # compiler, profiler
    "_dynamo": (torch, "how a compiled model is called, and what of it breaks the graph"),
    "_orig_mod": (compiled, "the model inside of a compiled one"),
    "_torchdynamo_orig_callable": (compiled_forward, "the function inside of a compiled one"),
    "_record_memory_history": (torch.cuda.memory, "profiles of device memory"),
    "_dump_snapshot": (torch.cuda.memory, "profiles of device memory"),
    # fake tensors, of which the public face is a mode alone
    "_is_param": (fake_param, "torch marks a fake parameter so, to pass for nn.Parameter"),
    # process groups
    "_get_backend": (dist.ProcessGroup, "what a group of a device can do: split, and launch collectives together"),
    # files
    "_StorageInfo": (
        importlib.import_module("torch.distributed.checkpoint.filesystem"),
        "where torch's distributed checkpoints say in which file a tensor is",
    ),
    # threads as ranks, for tests
    "_dispatch_get_all_op_names": (torch._C, "[Note: operators looked up by threads] in testing.py"),
}
"""By name: an object that has it, or a function that makes one, and what for."""

NOT_ALWAYS_THERE = {
    "_C": "the extension itself",
    "_group_start": "of a build with NCCL: collectives launched together, in comm/transport/nccl.py",
    "_group_end": "of a build with NCCL: collectives launched together, in comm/transport/nccl.py",
    "_ensureCUDADeviceGuardSet": "[Note: a device guard replaced by threads] in testing.py; asked for with getattr",
}
OF_PYTHON = ("_exit", "_getframe", "_current_frames", "_collections_abc", "_option_string_actions", "_inheriting")
"""The first three are documented; argparse has no public way from an option's text to the option, and multiprocessing
none to ask whether a process imports the main script."""

OF_OTHERS = {
    "transformers": (
        *(
            "_attn_implementation",
            "_attn_implementation_internal",
            "_can_set_attn_implementation",
            "_tp_plan",
            "_ep_plan",
            "_apply_gate",
        ),
        *("_keys_to_ignore_on_load_unexpected", "_keys_to_ignore_on_save", "_init_weights", "_is_hf_initialized"),
        *("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"),
        *("_load_pretrained_model", "_globalstep_last_logged", "_prepare_inputs"),
    ),
    "verl": ("_build_model_optimizer",),
    "accelerate": ("_is_overflow", "_save_model_state_pre_hook", "_gpu_gather", "_gpu_gather_object"),
    "lightning": (
        *("_compiler_ctx", "_layer_sync", "_lightning_optimizers", "_reset_optimizers_and_schedulers", "_restarting"),
        *("_data_source", "_mode"),
    ),
    "keras": ("_trainable_variables",),
    "trl": ("_iter_named_params", "_move_model_to_vllm"),
    "pydantic": ("_internal", "_model_construction"),
}
"""Of libraries that scripts bring: `tests/extras` runs with them. They are what these libraries have for their own
engines, or for subclasses."""


_WORD = re.compile(r"\b_[A-Za-z]\w*")
_DEFINED = re.compile(
    r"""\b(?:def|class)\ (_\w+)  |  \b(?:self|cls)\.(_(?!_)\w+)(?=[^=\n]*\ =\ |:\ )  |  __dict__\["(_\w+)"\]
    |  ^\s*(_\w+)(?=[^=(\n]*(?:\ =\ |:\ ))""",
    re.VERBOSE | re.MULTILINE,
)


def private_uses(known: Collection[str]) -> Iterator[tuple[str, str]]:
    """Name and place of each private name in the source that is not `known`, and that no class, function or assignment
    of the source defines. Only files with such words are parsed: all of them would take a minute."""
    texts = {file: file.read_text() for file in sorted(SOURCE.rglob("*.py"))}
    own = {name for text in texts.values() for found in _DEFINED.findall(text) for name in found}
    for file, text in texts.items():
        place, others = file.relative_to(SOURCE).as_posix(), {*_WORD.findall(text)} - own - {*known}
        if not others or place in SEAMS:
            continue
        for node in ast.walk(ast.parse(text)):
            yield from ((name, f"{place}:{node.lineno}") for name in _named_by(node) if name in others)  # type: ignore[attr-defined]


def _named_by(node: ast.AST) -> list[str]:
    found: list[str] = []
    if isinstance(node, ast.Attribute):
        found = [node.attr]
    elif isinstance(node, ast.Import):
        found = [part for alias in node.names for part in alias.name.split(".")]
    elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("shardwise"):
        found = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
        found = [str(node.args[1].value)] if isinstance(node.args[1], ast.Constant) else []
    return [name for name in found if name.startswith("_") and not name.startswith("__") and name != "_"]


@pytest.mark.parametrize("name", OF_TORCH)
def test_torch_has_what_is_used_of_it(name: str) -> None:
    owner, reason = OF_TORCH[name]
    owner = owner() if isinstance(owner, FunctionType) else owner
    assert hasattr(owner, name), (
        f"torch {torch.__version__} has no {name} any more, which is used because: {reason}. Find what replaces it, "
        f"and keep the old way for the versions that have it."
    )


def test_the_seams_have_what_they_import() -> None:
    """Their imports would have failed; what their functions use is used here."""
    assert all(hasattr(torch_private, name) for name in torch_private.__all__)
    assert all(hasattr(compat, name) for name in compat.__all__)
    assert torch_private.graph_task() == -1
    assert not torch_private.is_transforming()
    assert torch.func.vmap(lambda x: x * torch_private.is_transforming())(torch.ones(2)).tolist() == [1, 1]
    freed = [torch.ones(1).untyped_storage().resize_(0) for _ in range(2)]
    assert torch_private.storage_id(freed[0]) != torch_private.storage_id(freed[1])
    assert torch_private.parsed_to("cpu", torch.float64)[:2] == (torch.device("cpu"), torch.float64)
    torch_private.forget_cached_parametrizations()
    assert {"grad", "data", "requires_grad"} <= torch_private.TENSOR_ATTRIBUTES.keys()
    torch_private.set_version(TENSOR, TENSOR._version + 1)
    alias = torch_private.with_same_version(TENSOR)
    alias.add_(0)
    assert alias._version == TENSOR._version


def test_no_other_private_part_is_used() -> None:
    known = {*OF_TORCH, *NOT_ALWAYS_THERE, *OF_PYTHON, *(name for names in OF_OTHERS.values() for name in names)}
    places = defaultdict(list)
    for name, place in private_uses(known - {"_tp_plan", "_assert_async"}):
        places[name].append(place)
    assert places.pop("_tp_plan")
    assert places.pop("_assert_async")  # so that the search finds what there is
    assert not places, (
        f"{dict(places)}: private parts of another library. Use what is public; if nothing is, put an import into "
        f"system/torch_private.py, or an attribute into this file's list, with the reason."
    )


def test_operators_that_write_what_their_schemas_do_not_say_are_known() -> None:
    """Those that update running statistics. `instance_norm` counts what it writes."""
    ends = ("_functional", "_backward", "_no_update", "_no_training")
    found = {
        schema.name
        for schema in torch._C._jit_get_all_schemas()
        for argument in schema.arguments
        if argument.name == "running_mean" and argument.alias_info is None
    }
    written = {name for name in found if name.startswith("aten::") and not name.endswith(ends)}
    assert written - torch_private.UNMARKED == {"aten::instance_norm"}
