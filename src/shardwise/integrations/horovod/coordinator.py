"""The coordinator: a thread of rank 0 that receives the ranks' requests and sends responses in one order to all."""

from __future__ import annotations

import logging
import selectors
import threading
import time
from collections.abc import Mapping

from shardwise.integrations.horovod.links import Link
from shardwise.integrations.horovod.messages import MessageDecoder, MessageEncoder, Request, Response
from shardwise.integrations.horovod.negotiation import STALL_HINT, Negotiation
from shardwise.integrations.horovod.settings import Settings
from shardwise.integrations.horovod.timeline import Timeline

DONE, LEAVE = b"d", b"l"
"""What ranks send besides requests: a response has been executed; this rank leaves."""
_NUM_IN_FLIGHT = 2
"""The number of responses that ranks execute or have queued; what becomes ready meanwhile is fused."""
_POLL_SECONDS = 0.5
_LOST = "has exited without calling shutdown(), or lost its connection to rank 0"
_log = logging.getLogger("shardwise")


class Coordinator:
    """Runs until all ranks have left."""

    def __init__(
        self, links: Mapping[int, Link], sets: Mapping[int, tuple[int, ...]], settings: Settings, timeline: Timeline
    ) -> None:
        self._links = dict(links)
        self._settings = settings
        self._negotiation = Negotiation(len(links), sets, timeline.negotiated)
        self._decoders = {rank: MessageDecoder(Request.from_text) for rank in links}
        self._encoders = {rank: MessageEncoder(settings.cache_capacity) for rank in links}
        self._selector = selectors.DefaultSelector()
        for rank, link in links.items():
            self._selector.register(link, selectors.EVENT_READ, rank)
        self._thread = threading.Thread(target=self._run, name="horovod-coordinator", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> None:
        """Wait until it has ended, for at most `seconds`."""
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            self._serve()
        finally:  # ranks raise when their links are closed, instead of waiting forever
            for link in self._links.values():
                link.close()
            self._selector.close()

    def _serve(self) -> None:
        checked = time.monotonic()
        while self._links:
            for key, _ in self._selector.select(_POLL_SECONDS):
                self._receive(key.data)
            now = time.monotonic()
            if now - checked > _POLL_SECONDS:
                checked = now
                self._check_stalls(now)
            self._send_responses()

    def _receive(self, rank: int) -> None:
        link = self._links.get(rank)
        messages = link.receive_ready() if link is not None else []
        if messages is None:
            self._drop(rank, _LOST)
            return
        for message in messages:
            if message == DONE:
                self._negotiation.acknowledge(rank)
            elif message == LEAVE:
                self._drop(rank, "has called shutdown(), or its script has ended")
                return
            else:
                self._negotiation.issue(rank, self._decoders[rank].decode(message), time.monotonic())

    def _check_stalls(self, now: float) -> None:
        settings = self._settings
        for warning in self._negotiation.check_stalls(
            now, settings.stall_warning_seconds, settings.stall_error_seconds
        ):
            _log.warning("%s. %s", warning, STALL_HINT)

    def _send_responses(self) -> None:
        negotiation = self._negotiation
        while negotiation.ready and (len(negotiation.outstanding) < _NUM_IN_FLIGHT or negotiation.ready[0].error):
            response = negotiation.take(self._settings.fusion_bytes)
            for rank in negotiation.members(response):
                self._send(rank, response)

    def _send(self, rank: int, response: Response) -> None:
        try:
            self._links[rank].send(self._encoders[rank].encode(response))
        except OSError:
            self._drop(rank, _LOST)

    def _drop(self, rank: int, why: str) -> None:
        link = self._links.pop(rank, None)
        if link is not None:
            self._selector.unregister(link)
            link.close()
            self._negotiation.leave(rank, why)
