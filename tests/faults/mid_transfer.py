"""Run by `test_mid_transfer.py`: three ranks send to each other, until rank 1 fails in the middle of a message.

mid_transfer.py RANK PORT OUT HOW    HOW: killed, or cut, which breaks its connection to rank 0
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import struct
import sys
import termios
import time
from pathlib import Path

import torch

import shardwise as sw
from shardwise.comm.transport.gloo import GlooTransport
from shardwise.errors import FaultError

NUM_RANKS, NUM_ELEMENTS = 3, 2**26


def fail_in_the_middle(world: sw.World, how: str) -> None:
    """Once some of what this rank sends to rank 0 lies in its connection: a message is far larger than that can be."""
    assert isinstance(world.transport, GlooTransport)
    (descriptor,) = (one for one, other in world.transport._sockets._ranks.items() if other == 0)
    while not struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)))[0]:
        time.sleep(0)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.closing(socket.socket(fileno=os.dup(descriptor))) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def main(rank: int, port: int, out: Path, how: str) -> None:
    torch.set_num_threads(1)
    where = {"RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    where["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # of the test's
    world = sw.World.join(environment=where, shares_memory=False, patience_seconds=1)
    tensor = torch.zeros(NUM_ELEMENTS)
    collectives = world.collectives(tensor.device)
    try:
        world.barrier()
        under_way = collectives.all_reduce(tensor, tensor, world.everybody, tensor.dtype, "all of it")
        if rank == 1:
            fail_in_the_middle(world, how)
        under_way.wait()
    except FaultError as error:
        (out / f"fault-{rank}").write_text(str(error))
        world.close(error)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
