"""`python -m shardwise.launch.hosts [members]`: the agent that ssh starts on a host, with `members` for elastic jobs;
with `connect HOST:PORT` in a pod, which connects to the launcher."""

from __future__ import annotations

import os
import sys

from shardwise.launch.elastic.image_folder import Images
from shardwise.launch.hosts.host_agent import HostAgent
from shardwise.launch.hosts.host_messages import Inbox, Outbox
from shardwise.launch.hosts.members import MemberAgent
from shardwise.launch.hosts.pod import CONNECT
from shardwise.launch.hosts.pod import main as serve_in_pod
from shardwise.launch.log_folder import Folder
from shardwise.launch.places.ssh import MEMBERS
from shardwise.launch.signals import SignalLog


def main() -> None:
    """Serve the launcher, over stdin and stdout, or over a connection that a pod opens."""
    if sys.argv[1:2] == [CONNECT]:
        sys.exit(serve_in_pod(sys.argv[2:]))
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # keeps a library's output out of the messages
    inbox, outbox = Inbox(sys.stdin.fileno()), Outbox(out)
    with SignalLog() as signals, Folder(None) as folder:
        if MEMBERS in sys.argv[1:]:
            with Images() as images:
                MemberAgent(inbox, outbox, folder, images, signals).run()
        else:
            HostAgent(inbox, outbox, folder, signals).run()


if __name__ == "__main__":
    main()
