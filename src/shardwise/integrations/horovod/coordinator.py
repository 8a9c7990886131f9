"""The thread of rank 0 that finds what all ranks have issued, and tells them in which order to carry it out."""

from __future__ import annotations

import logging
import selectors
import threading
import time
from collections.abc import Mapping

from shardwise.integrations.horovod.links import Link
from shardwise.integrations.horovod.matching import Matching
from shardwise.integrations.horovod.messages import Remembered, Remembering, Request, Response
from shardwise.integrations.horovod.settings import Settings
from shardwise.integrations.horovod.timeline import Timeline

DONE, LEAVE = b"d", b"l"
"""What ranks send besides requests: a response is carried out; this rank takes part no longer."""
_NUM_AHEAD = 2
"""So many responses are under way at a time; what becomes ready meanwhile is put together."""
_LOOK_SECONDS = 0.5
_log = logging.getLogger("shardwise")


class Coordinator:
    """Starts at once; ends by itself when all ranks have left."""

    def __init__(
        self, links: Mapping[int, Link], sets: Mapping[int, tuple[int, ...]], settings: Settings, timeline: Timeline
    ) -> None:
        self._links = dict(links)
        self._settings = settings
        self._matching = Matching(len(links), sets, timeline.negotiated)
        self._heard = {rank: Remembered(Request.from_text) for rank in links}
        self._told = {rank: Remembering(settings.cache_capacity) for rank in links}
        self._selector = selectors.DefaultSelector()
        for rank, link in links.items():
            self._selector.register(link, selectors.EVENT_READ, rank)
        self._thread = threading.Thread(target=self._run, name="horovod-coordinator", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> None:
        """Until it has ended, or the time is up."""
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            self._serve()
        finally:  # whatever ends this thread: ranks whose links are closed raise, and do not wait for ever
            for link in self._links.values():
                link.close()
            self._selector.close()

    def _serve(self) -> None:
        checked = time.monotonic()
        while self._links:
            for key, _ in self._selector.select(_LOOK_SECONDS):
                self._hear(key.data)
            now = time.monotonic()
            if now - checked > _LOOK_SECONDS:
                checked = now
                self._look_for_stalls(now)
            self._tell()

    def _hear(self, rank: int) -> None:
        link = self._links.get(rank)
        messages = link.arrived() if link is not None else []
        if messages is None:
            self._lose(rank, "is gone without a word")
            return
        for message in messages:
            if message == DONE:
                self._matching.acknowledge(rank)
            elif message == LEAVE:
                self._lose(rank, "has called shutdown(), or its script has ended")
                return
            else:
                self._matching.issue(rank, self._heard[rank].decode(message), time.monotonic())

    def _look_for_stalls(self, now: float) -> None:
        settings = self._settings
        for warning in self._matching.give_up(now, settings.stall_warning_seconds, settings.stall_error_seconds):
            _log.warning("%s. Do all ranks take the same path? A rank without data calls join().", warning)

    def _tell(self) -> None:
        matching = self._matching
        while matching.ready and (len(matching.outstanding) < _NUM_AHEAD or matching.ready[0].error):
            response = matching.take(self._settings.fusion_bytes)
            for rank in matching.members(response):
                self._send(rank, response)

    def _send(self, rank: int, response: Response) -> None:
        try:
            self._links[rank].send(self._told[rank].encode(response))
        except OSError:
            self._lose(rank, "is gone without a word")

    def _lose(self, rank: int, why: str) -> None:
        link = self._links.pop(rank, None)
        if link is not None:
            self._selector.unregister(link)
            link.close()
            self._matching.leave(rank, why)
