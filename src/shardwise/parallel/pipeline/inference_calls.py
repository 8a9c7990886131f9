"""Calls of the model itself in a pipeline, without gradients: inside `engine.inference()`.

[Note: calls by all] Each call is a single micro-batch: a rank runs its stages, and the last stage's rank then sends the
output to all, so that every rank returns what the unsplit model does, and code around the call, such as a loop that
generates, runs on every rank as it is. So all ranks of a pipeline have to make the same calls. Each is preceded by a
meeting that compares them, and so is the end. Shapes may change from call to call: layouts travel with tensors.
What is called may also be a module in the model: peft's `generate` calls the model that it wraps, and that of
encoder-decoder models the encoder first. A part begins and ends where it is, and its last rank sends the output. A call
of the whole model that is given the encoder's states begins with the decoder: stages before are passed over.

The alternative, one rank that drives the others, saves a broadcast of the logits per token, but then code around the
model runs on one rank, and the others have to interpret its orders.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.comm import BatchCheck, Collectives, require_same_batch
from shardwise.errors import StateError
from shardwise.parallel.pipeline.caches import CallCache, Growth, cache_in, layers_of, with_cache
from shardwise.parallel.pipeline.call_agreement import CallAgreement
from shardwise.parallel.pipeline.call_outputs import describe, layouts_in, rebuilt, refuse_collected
from shardwise.parallel.pipeline.pipeline import Pipeline, Share
from shardwise.parallel.pipeline.stage_layout import Span
from shardwise.parallel.pipeline.staged_model import NOTHING, Carried, Forward
from shardwise.runtime import Inference, named_tensors
from shardwise.runtime.micro_batches import MicroBatch

Tensor = torch.Tensor


class Calls:
    """Answers calls of a model in stages. `collectives` are those of `device`, where the model is."""

    def __init__(
        self,
        pipeline: Pipeline,
        collectives: Collectives,
        device: torch.device,
        inference: Inference,
        agreement: CallAgreement,
    ) -> None:
        self._pipeline = pipeline
        self._inference = inference
        self._agreement = agreement
        self._staged = pipeline.staged
        self._line = pipeline.line
        self._collectives = collectives
        self._batches = BatchCheck(self._line, device)
        self._layers = {stage: layers_of(self._staged.modules_of(stage)) for stage in self._staged.stages}

    @contextmanager
    def answered(self) -> Iterator[None]:
        """A context in which the model may be called. All ranks of the pipeline enter, and make the same calls."""
        staged = self._staged
        staged.answer, staged.gathers_in_calls = self._answer, self._agreement.are_common
        try:
            with staged.catching(*staged.extents):
                yield
            while not self._agreement.end():
                self._stand_by()
        except BaseException:
            self._agreement.fail()
            raise
        finally:
            staged.answer, staged.gathers_in_calls = None, False

    def _stand_by(self) -> None:
        """While other pipelines make a call, take part in the rounds of this rank's stages."""
        for _ in self._staged.stages:
            with self._inference.rounds():
                pass
        self._agreement.call_is_over()

    def _answer(self, model: nn.Module, run: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of a call of `model`, the whole one or one in it, on every rank."""
        pipeline = self._pipeline
        self._require_possible(kwargs)
        kwargs = with_cache(model, args, kwargs)
        part = MicroBatch(args, kwargs)
        cache = cache_in(args, kwargs)
        grown = None if cache is None else CallCache(cache, self._layers)
        called_with = named_tensors(*_without(cache, args, kwargs))
        if not self._agreement.call(model, self._batches.word_of(called_with) or b""):
            require_same_batch(called_with, self._line)
        output: Any = None
        carried = NOTHING if cache is not None else pipeline.carried_for(part, called=model, is_whole=True)
        spans = dict(self._staged.shares_here(model))
        with pipeline.cleared_on_error(), pipeline.drawing():
            for stage in self._staged.stages:
                if stage not in spans:
                    with self._inference.rounds():
                        pass
                    continue
                with ExitStack() as stack:
                    if grown is not None:
                        stack.enter_context(grown.in_stage(stage))
                    output = self._through(stage, spans[stage], model, part, run, carried)
                run = model  # with its hooks, as if each further stage were a rank of its own
            if not spans:
                pipeline.pass_over(part, model)
            pipeline.end_forwards()
            return self._shared(output, grown, model)

    def _through(
        self, stage: int, span: Span, model: nn.Module, part: MicroBatch, run: Forward, carried: Carried
    ) -> Any:
        """Run the modules `span` of one stage, between what it receives and sends."""
        pipeline = self._pipeline
        is_first = span[0] == self._staged.extents[model][0]
        arrived = None if is_first else pipeline.forward_from[stage].receive_once()
        forward = partial(run, *part.args, **part.kwargs)
        with self._inference.rounds():
            share = Share(span, sends_others=True)
            output, sent = pipeline.through(
                stage, 0, part, arrived, forward, called=model, share=share, carried=carried
            )
        if sent is not None:
            pipeline.forward_to[stage].send_once(output, sent)
        return output

    def _shared(self, output: Any, cache: CallCache | None, called: nn.Module) -> Any:
        """The output of the last stage of a call, on every rank; the caches of all ranks then hold as much."""
        pp_rank, growth = self._line.index, None if cache is None else cache.growth()
        given = None if cache is None else cache.cache
        last = self._pipeline.place_of_output(called)
        tensors: list[Tensor] = []
        described: dict[str, Any] = {"grown": growth}
        if pp_rank == last:
            described |= describe(output, given, type(called).__name__, tensors)
        told: list[dict[str, Any]] = [json.loads(one) for one in self._line.exchange(json.dumps(described).encode())]
        self._agreement.call_is_over()
        layouts = layouts_in(told[last])
        if cache is not None:
            found = [Growth(*one["grown"]) for one in told if one["grown"] is not None]
            if found:
                cache.grow_others(found[0])
        tensors = self._pipeline.from_place(last, layouts, tensors)
        self._collectives.synchronize()
        return output if pp_rank == last else rebuilt(told[last], given, tensors)

    def _require_possible(self, kwargs: Mapping[str, Any]) -> None:
        if torch.is_grad_enabled():
            raise StateError(
                "The model was called with gradients enabled inside engine.inference(), where none can be computed. "
                "Train outside of it."
            )
        refuse_collected(self._staged.model, kwargs)


def _without(cache: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call without its cache, which differs between ranks."""
    return [one for one in args if one is not cache], {key: one for key, one in kwargs.items() if one is not cache}
