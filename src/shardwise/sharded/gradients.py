"""The gradients of one engine, from the backwards that leave them to the call that zeroes them.

[Note: life of a gradient] A backward leaves gradients where the plan says. They are *prepared* once, for the first
caller that needs them (a step, clipping, `p.grad`, `engine.get`): brought to where the update reads them, while all
ranks agree on their norm and on which parameters have one. A later backward adds to the prepared gradients, and the
next caller prepares again. As in plain PyTorch `optimizer.step()` leaves gradients in place, and `zero_grad` drops
them; `engine.step()` does both.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch

from shardwise.comm import Exchange
from shardwise.errors import StateError
from shardwise.memory import Flat
from shardwise.optim import Piece
from shardwise.optim.precision import (
    LossScaler,
    Norm,
    Verdict,
    check_copies,
    clip,
    norm_of,
    norms_of,
    scale_gradients,
)
from shardwise.runtime import Agreement, Runner

Tensor = torch.Tensor


class Gradients:
    """Prepares gradients, and lets them be read, changed, clipped and zeroed. All ranks call every method.

    `exchanges` are among all ranks, among those that list the same parameters, and among those with the same parts.
    `scaler` is called each time, because a checkpoint may bring another scale. With `only_finite` no step is taken with
    gradients whose norm is not finite.
    """

    def __init__(
        self,
        flats: Sequence[Flat],
        agreement: Agreement,
        runner: Runner,
        verdict: Verdict,
        exchanges: tuple[Exchange, Exchange, Exchange],
        scaler: Callable[[], LossScaler | None],
        *,
        only_finite: bool,
    ) -> None:
        self._flats = [flat for flat in flats if flat.spec.trainable]
        self._agreement = agreement
        self._runner = runner
        self._verdict = verdict
        self.before_verdict: Callable[[], object] = lambda: None
        """Called before ranks agree on an update. Who has the verdict may update while others still wait for it."""
        self._exchange, self._exchange_of_peers, self._exchange_of_data = exchanges
        self._uncompared = frozenset(
            slot.name for flat in self._flats for slot in flat.slots if slot.is_copied and not slot.is_split
        )
        """The parameters of which the first gradients have still to be compared between ranks that have copies."""
        self._num_compared = 0
        """How often gradients could have been compared since."""
        self._scaler = scaler
        self._only_finite = only_finite
        self._zeroed_at = runner.passes.num_backwards
        """How many backwards had ended when gradients were last zeroed."""
        self._prepared_at: tuple[int, int] | None = None
        """How many backwards had ended, and how many had been cut short, when gradients were last prepared."""
        self._judged_at: tuple[int, int] | None = None
        """The same when the loss scale was last updated from them."""
        self._stepped_at: tuple[int, int] | None = None
        """The same when a step last used them."""
        self._norm: Norm | None = None
        """The current 2-norm of the prepared gradients; `None` if it has to be recomputed."""
        self._norm_before: Norm | None = None
        """The same before any clipping."""
        self._norms: dict[float, list[float]] = {}
        self._lost: set[tuple[str, int]] = set()
        """Parameters whose gradient was lost with a backward that raised, and has not been zeroed since."""
        self._seen_lost_at = 0
        """How many backwards had been cut short when that was found."""
        self._holds_more = False
        """Whether there are gradients that no backward has left: zeros, or assigned ones."""
        self._is_clipped_by_plan = False
        self.is_of_stage = False
        """Whether they are those of some pipeline stages, and others are elsewhere."""
        self.num_stages_with: Mapping[str, int] = {}
        """In stages: on how many pipeline ranks a parameter is, if it is on several."""
        self.is_taken = True
        """Whether the step may be taken: gradients are finite, or need not be."""
        self._num_dropped = 0
        """How often all gradients were dropped."""
        self._num_dropped_alone: Counter[tuple[str, int]] = Counter()
        """How often one was."""

    # -- whether there are any --------------------------------------------------------------------------

    def exist(self) -> bool:
        """Whether any parameter may have a gradient. The same on all ranks; sends nothing."""
        since = max(self._zeroed_at, self._runner.passes.cut_short_at)
        return self._holds_more or self._runner.passes.num_backwards > since

    def wait(self) -> bool:
        """Whether gradients exist that no step has used yet. The same on all ranks; sends nothing."""
        return self.exist() and self._stepped_at != self._moment()

    @property
    def are_prepared(self) -> bool:
        """Whether they have been prepared, and no backward has ended since."""
        return self._prepared_at == self._moment()

    def note_step(self) -> None:
        """A step has used the current gradients, or none will."""
        self._stepped_at = self._moment()

    def has(self, flat: Flat, index: int) -> bool:
        """Whether a parameter has a gradient, on any rank."""
        if not flat.spec.trainable or not self.exist():
            return False
        self.prepare()
        return flat.grads.touched_anywhere[index]

    def epoch_of(self, flat: Flat, index: int) -> tuple[int, int]:
        """Another one whenever a parameter's gradient was dropped, so that who has it can tell that it is gone."""
        return self._num_dropped, self._num_dropped_alone[flat.name, index]

    # -- for the step -----------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Bring gradients to where the update needs them, unless they are there, and agree on which parameters have
        one."""
        self._require_none_lost()
        if self._prepared_at != self._moment():
            self._bring()

    def agree_on_changes(self) -> None:
        """Prepare, and in stages let all ranks compute the norm anew if one has changed gradients since: of a module
        that it alone has, such as a head whose gradients a loop drops."""
        self.prepare()
        if self.is_of_stage and any(any(told) for told in self._exchange(bytes([self._norm_before is None]))):
            self._forget_figures()

    def norm(self) -> Norm:
        """The global 2-norm of the current gradients. On a device it has not been waited for."""
        self.prepare()
        if self._norm is None:
            self._norm = norm_of(self._flats, 2.0, self._exchange)
        return self._norm

    def norm_before_clipping(self) -> Norm:
        self.prepare()
        if self._norm_before is None:
            self._norm_before = self.norm()
        return self._norm_before

    def _bring(self) -> None:
        scaler, runner = self._scaler(), self._runner
        if runner.passes.num_unweighed:
            raise StateError(
                "Ranks have different numbers of samples, and gradients of experts, or of batch norms over all ranks, "
                "are of the rows of all ranks, so each loss has to be weighed. Call engine.backward(loss) in the place "
                "of loss.backward(); zero_grad() forgets what has come so far."
            )
        if scaler is not None and self._prepared_at is not None and self.is_taken:
            scale_gradients(self._flats, scaler.scale)  # as are the gradients that have come since
        runner.end_calls()
        self.before_verdict()
        runner.step.before()
        norm = self._verdict.decide()
        if self._verdict.is_incomplete:
            runner.step.reduce_unforeseen()
            runner.step.before()
            norm = self._verdict.decide()
        self._forget_figures()
        self.is_taken = not (self._only_finite and self.exist()) or math.isfinite(float(norm))
        if scaler is not None and self.exist():
            norm = self._unscaled(scaler.scale, float(norm))
        if self._uncompared and self.exist() and math.isfinite(float(norm)):
            self._compare_copies()
        self._norm = self._norm_before = norm
        self._prepared_at = self._moment()

    def _compare_copies(self) -> None:
        """Compare the first gradients of parameters of which ranks have copies. Those that do not get any at first are
        compared in the second, fourth, eighth step and so on."""
        self._num_compared += 1
        if self._num_compared.bit_count() == 1:
            self._uncompared = check_copies(
                self._flats, self._uncompared, self._exchange_of_data, self._exchange_of_peers
            )

    def _unscaled(self, scale: float, norm: float) -> float:
        """Divide the gradients and their norm by the loss scale, unless one has overflowed."""
        if self._runner.passes.num_unscaled:
            raise StateError(
                "precision fp16 needs a scaled loss, but gradients came from a backward of one that was not. Call "
                "engine.backward(loss), or engine.scale(loss).backward(), in the place of loss.backward(), for every "
                "micro-batch; zero_grad() forgets what has come so far."
            )
        if not self.is_taken:
            return norm
        scale_gradients(self._flats, 1 / scale)
        return norm / scale

    def judge(self) -> bool:
        """Whether a step may be taken, by the gradients as they are now, whoever has written to them since they were
        prepared. Updates the loss scale once, however often that was."""
        self.prepare()
        scaler = self._scaler()
        if self._only_finite and self.exist():
            is_finite = math.isfinite(float(self.norm_before_clipping()))
            self.is_taken = is_finite and (self.is_taken or scaler is None)  # what has overflowed is still scaled
        if scaler is not None and self.exist() and self._judged_at != self._moment():
            self._judged_at = self._moment()
            scaler.judge(0.0 if self.is_taken else math.inf)
        return self.is_taken

    def clip(self, max_norm: float, norm_type: float = 2.0) -> Norm:
        """Scale to a global norm of at most `max_norm`; returns the norm before."""
        self.agree_on_changes()
        return self._clip(max_norm, norm_type)

    def _clip(self, max_norm: float, norm_type: float = 2.0) -> Norm:
        norm = self.norm()
        if norm_type != 2:
            norm = norm_of(self._flats, norm_type, self._exchange)
        if clip(self._flats, norm, max_norm):
            before = self._norm_before
            self._forget_figures()
            self._norm_before = before
        return norm

    def clip_by_plan(self, max_norm: float) -> None:
        """Apply the plan's `clip_grad_norm` before an update, once, however many optimizers there are."""
        if not self._is_clipped_by_plan:
            self._clip(max_norm)
            self._is_clipped_by_plan = True

    # -- one parameter ----------------------------------------------------------------------------------

    def norms(self, flat: Flat, index: int, norm_type: float) -> float:
        """The norm of one parameter's gradient. Those of all are computed together, in one message."""
        if self.is_of_stage and sum(len(flat.slots) for flat in self._flats) == 1:
            raise StateError(
                "This rank's pipeline stages have one parameter that is trained, so its gradient's norm would look "
                "like that of all, as in torch's clip_grad_norm_. Use engine.clip_grad_norm_(max_norm), or "
                "clip_grad_norm in the plan; to log the norm of one of any stage, take "
                "engine.get(name, 'grad').norm(), on all ranks."
            )
        self.prepare()
        if norm_type not in self._norms:
            of_stage = norms_of(self._flats, norm_type, self._exchange_of_peers)
            names = (slot.name for flat in self._flats for slot in flat.slots)
            counted = [self.num_stages_with.get(name, 1) for name in names]  # each stage counts its share of the square
            self._norms[norm_type] = [
                norm * (1.0 if math.isinf(norm_type) else num ** (1 / norm_type))
                for norm, num in zip(of_stage, counted, strict=True)
            ]
        start = 0
        for other in self._flats:
            if other is flat:
                return self._norms[norm_type][start + index]
            start += len(other.slots)
        return 0.0

    def piece(self, flat: Flat, index: int) -> Tensor:
        """This rank's elements of an existing gradient. Call `changed` after writing to them."""
        if not flat.grads.has_due:
            flat.grads.make_due()
        piece = flat.grads.due_piece(index)
        assert piece is not None
        return piece

    def changed(self) -> None:
        """A gradient has been written to: forget cached norms."""
        self._forget_figures()

    def assign(self, flat: Flat, index: int, value: Tensor | None) -> None:
        """Replace a parameter's gradient by the mean of every rank's whole `value`; `None` removes it."""
        if self.exist():
            self.prepare()
        else:
            self._prepared_at = self._moment()
        piece = self.piece(flat, index)
        if value is None:
            piece.zero_()
        else:
            span = flat.slots[index].span.overlap(flat.optim_span).within(flat.slots[index].span)
            slot = flat.slots[index]
            mean = self._agreement.mean(flat, value.detach().reshape(-1).to(piece.dtype), slot)
            piece.copy_(mean[span.as_slice] / flat.spec.num_summands)
            self._holds_more = True
        self._note(flat, index, has_one=value is not None)
        self._forget_figures()

    def _note(self, flat: Flat, index: int, *, has_one: bool) -> None:
        flat.grads.note(index, has_one=has_one)
        self._num_dropped_alone[flat.name, index] += not has_one

    # -- the end ----------------------------------------------------------------------------------------

    def zero(self, pieces: Sequence[Piece] | None = None, *, keep: bool = False) -> None:
        """Drop the gradients of `pieces`, or all; with `keep` they become zeros, on which optimizers still act."""
        if keep or pieces is not None:
            self._zero_some(pieces, keep=keep)
            return
        self._runner.recover_if_left()  # so that what it has left is dropped here, and not missed later
        for flat in self._flats:
            flat.grads.drop()
        self._zeroed_at = self._runner.passes.num_backwards
        self._runner.clear_faults()
        self._lost.clear()
        self._prepared_at, self._holds_more, self.is_taken = None, False, True
        self._num_dropped += 1
        self._forget_figures()

    def _zero_some(self, pieces: Sequence[Piece] | None, *, keep: bool) -> None:
        places = self._places() if pieces is None else [(piece.flat, piece.index) for piece in pieces]
        self._find_lost()
        if self._lost:
            self._lost -= {(flat.name, index) for flat, index in places}
            if not self._lost:
                self.zero()
            return
        if not self.exist():
            self.zero()
            return
        self.prepare()
        self._holds_more = True
        for flat, index in places:
            if flat.spec.trainable and flat.grads.touched_anywhere[index]:
                self.piece(flat, index).zero_()
                self._note(flat, index, has_one=keep)
        if not self.is_of_stage and not any(any(flat.grads.touched_anywhere) for flat in self._flats):
            self.zero()
            return
        self.is_taken = True
        self._forget_figures()

    def _places(self) -> list[tuple[Flat, int]]:
        return [(flat, index) for flat in self._flats for index in range(len(flat.slots))]

    # -- what it knows ----------------------------------------------------------------------------------

    def _moment(self) -> tuple[int, int]:
        return self._runner.passes.num_backwards, self._runner.passes.num_cut_short

    def _forget_figures(self) -> None:
        self._norm = self._norm_before = None
        self._norms.clear()
        self._is_clipped_by_plan = False

    def _find_lost(self) -> None:
        """Detect a backward that raised while other gradients waited: those are lost with it."""
        self._runner.recover_if_cut_short()
        cut_at = self._runner.passes.cut_short_at
        has_lost = cut_at > self._zeroed_at or (self._holds_more and cut_at >= 0)
        if has_lost and self._seen_lost_at != self._runner.passes.num_cut_short:
            self._seen_lost_at = self._runner.passes.num_cut_short
            self._lost = {(flat.name, index) for flat, index in self._places()}

    def _require_none_lost(self) -> None:
        self._find_lost()
        if self._lost:
            raise StateError(
                "A backward raised, and the gradients that waited beside it are incomplete now. Call zero_grad(), and "
                "take the micro-batches of this step again."
            )
