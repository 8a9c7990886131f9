"""Hooks, the recorder of the first step, and the executor of the program."""

from shardwise.runtime.agree import Agreement
from shardwise.runtime.buffer_sync import BufferSync
from shardwise.runtime.compiled import WrappedForward, check_backend, own_forward
from shardwise.runtime.decisions import Decisions, decided
from shardwise.runtime.executor import Executor
from shardwise.runtime.grad_mover import GradMover
from shardwise.runtime.hooks import EndOfForward, NotCopied, changed_inside, in_backward, refuse_transformed_calls
from shardwise.runtime.nested import argument_tensors, named_tensors, tensors_in
from shardwise.runtime.no_grad_forwards import Inference, bytes_inside, keeps_all
from shardwise.runtime.param_mover import ParamMover
from shardwise.runtime.runner import Runner, Settings

__all__ = [
    "Agreement",
    "BufferSync",
    "Decisions",
    "EndOfForward",
    "Executor",
    "GradMover",
    "Inference",
    "NotCopied",
    "ParamMover",
    "Runner",
    "Settings",
    "WrappedForward",
    "argument_tensors",
    "bytes_inside",
    "changed_inside",
    "check_backend",
    "decided",
    "in_backward",
    "keeps_all",
    "named_tensors",
    "own_forward",
    "refuse_transformed_calls",
    "tensors_in",
]
