"""The launcher's main loop for an elastic job, with members that only send messages, and a clock that tests turn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any

from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but not in __all__

from shardwise.comm.members import MemberMessage, Pace
from shardwise.comm.members.channels import MemberChannel
from shardwise.launch.autoscale import Gain, Sizes
from shardwise.launch.elastic.budget import Budget
from shardwise.launch.elastic.context import Context
from shardwise.launch.elastic.main_loop import ElasticAgent
from shardwise.launch.elastic.scaling import Asking, Scaling
from shardwise.launch.elastic.slots import Slot, Slots
from shardwise.launch.environment import Attempt
from shardwise.launch.job import Elastic, Job
from shardwise.launch.log_folder import Folder
from shardwise.launch.signals import SignalLog
from shardwise.system.job_token import Seal, new_token
from tests.patience import PATIENCE
from tests.pure.simulated_workers import SimulatedWorkers

TOKEN = new_token()
CUT = "Ranks 0 and 1 could not reach each other, though both are alive. The connection to rank 1 broke: reset."


class Members(SimulatedWorkers):
    """The processes of a job: a step of `script` for each second that the launcher waits."""

    def __init__(self, script: Iterator[None]) -> None:
        super().__init__(lambda: next(script, None))
        self.settings: list[dict[str, str]] = []

    def start(self, number: int, slot: Slot, attempt: Attempt, settings: dict[str, str]) -> None:
        super().start(number, slot, attempt, settings)
        self.settings.append(settings)


def said_by_the_launcher(
    script: Callable[[Callable[..., None]], Iterator[None]],
    scaling: Scaling | None = None,
) -> list[str]:
    """What the launcher prints about a job of two members that send what `script` says."""
    store, said = HashStore(), list[str]()
    channels = [MemberChannel(store, "0", number, Seal(TOKEN, "0")) for number in range(2)]

    def send(kind: Any, generation: int = -1, **more: Any) -> None:
        for number, channel in enumerate(channels):
            if kind == "pace" and number:
                continue
            only = more if kind in ("ready", "pace") and number == 0 else {}
            channel.send(MemberMessage(kind, number, generation, patience_seconds=20, **only))

    members: Any = Members(script(send))
    elastic = Elastic(2, 2, retries=0)
    slots = Slots(2, Budget(0, 600))
    slots.ready("", 2, 0.0)
    job = Job((__file__,), 2, elastic=elastic)
    with SignalLog() as signals, Folder(None) as folder:
        context = Context(
            *(job, elastic, store, "127.0.0.1", 1, "run", folder, members, slots, signals, said.append, TOKEN),
            scaling=scaling,
            clock=lambda: members.now,
        )
        agent = ElasticAgent(context)
        assert not agent.run()
        told = {settings.get("SHARDWISE_AUTOSCALE") for settings in members.settings}
        assert told == {None if scaling is None else "2"}, "ranks measure their pace where the launcher wants to know"
        assert not agent.is_final
    return said


def begin(send: Callable[..., None]) -> Iterator[None]:
    """A generation is formed, and then the connection breaks."""
    send("here")
    yield
    send("opened", 0)
    yield
    send("ready", 0, text=CUT, cut_off=(0, 1), step=7)
    yield


def test_a_network_that_stays_down_is_told_while_the_ranks_wait_and_at_the_end() -> None:
    """It was only recorded: what is printed was printed when the next group was formed."""
    waiting, *rest = said_by_the_launcher(begin)
    assert waiting == f"the ranks have not formed a new group for 10 s. Cause: network: {CUT}"
    assert rest[0] == f"cause: network: {CUT}"
    assert not [line for line in rest if "have not formed" in line]


def test_a_network_that_comes_back_is_told_once() -> None:
    def script(send: Callable[..., None]) -> Iterator[None]:
        yield from begin(send)
        send("opened", 1)
        yield
        for _ in range(20):
            yield
        send("ready", 1, text="Rank 0 raised.", step=8)  # and does not come back

    first, *rest = said_by_the_launcher(script)
    assert first == (
        f"the ranks have formed a new group. Cause: network: {CUT} The step is repeated. 2 ranks continue after step 7."
    )
    assert not [line for line in rest if CUT in line or "have not formed" in line]


def test_a_job_that_grows_is_asked_for_more_by_what_its_ranks_tell() -> None:
    def script(send: Callable[..., None]) -> Iterator[None]:
        send("here")
        yield
        send("opened", 0)
        yield
        yield
        for _ in range(2):  # windows
            send("pace", 0, step=30, text=Pace(2, 0.5, 0.01, {1: 0.9, 2: 0.5, 4: 0.26}).to_text())
            for _ in range(20):
                yield
        send("ready", 0, text=CUT, cut_off=(0, 1), step=40)  # and no more is heard
        yield

    class Offer:
        room = 8
        asked: tuple[int, Collection[str]] = 0, ()

        def ask(self, num_slots: int, hosts: Collection[str]) -> None:
            self.asked = num_slots, hosts
            was_asked.set()

    place, said, was_asked = Offer(), list[str](), threading.Event()
    asking = Asking(place, said.append)
    sizes = partial(Sizes.of, 2, 8, 2)
    monday = datetime(2026, 11, 30, tzinfo=UTC)
    said_by_the_launcher(script, Scaling(Gain(0.8), sizes, asking, said.append, lambda: monday, wanted=2))
    assert was_asked.wait(PATIENCE)
    asking.close()
    assert place.asked == (4, ("",))
    why = "2 ranks train at 2 steps/s; with 4 each is expected to do 87% of what one would alone"
    assert said == [f"autoscale: 4 ranks instead of 2: {why}."]
