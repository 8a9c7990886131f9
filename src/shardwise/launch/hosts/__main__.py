"""`python -m shardwise.launch.hosts`: what ssh starts on a host."""

from __future__ import annotations

import os
import sys

from shardwise.launch.folder import Folder
from shardwise.launch.hosts.agent import HostAgent
from shardwise.launch.hosts.wire import Inbox, Outbox
from shardwise.launch.signals import SignalLog


def main() -> None:
    """Serve whoever is at the other end of stdin and stdout."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is not a message
    with SignalLog() as signals, Folder(None) as folder:
        HostAgent(Inbox(sys.stdin.fileno()), Outbox(out), folder, signals).run()


if __name__ == "__main__":
    main()
