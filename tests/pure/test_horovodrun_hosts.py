"""Hosts and environment variables on command lines of `horovodrun`."""

from __future__ import annotations

import argparse

import pytest

from shardwise.integrations.horovod.command_line import LaunchCommand, add_horovodrun_arguments, launch_command
from shardwise.integrations.horovod.command_line_hosts import environment_arguments


def translated(text: str) -> LaunchCommand:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_horovodrun_arguments(parser)
    return launch_command(parser.parse_args([*text.split(), "python", "train.py"]))


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("-np 4 -H a:2,b:2", "--where ssh --hosts a:2,b:2"),
        ("-np 3 -H a:2,b:2,c:4", "--where ssh --hosts a:2,b:1"),
        ("-H a:2,b", "--where ssh --hosts a:2,b:1"),
        ("-np 4 -H a:2,b:2 -p 2222 -i key", "--where ssh --hosts a:2,b:2 --ssh-port 2222 --identity key"),
        ("-np 2 -H a:1,b:1 --network-interfaces eth1",
         "--where ssh --hosts a:1,b:1 --env=GLOO_SOCKET_IFNAME=eth1 --env=NCCL_SOCKET_IFNAME=eth1"),
        ("-np 2 -H localhost:2,b:2", "--nproc 2"),
        ("-np 4 --min-np 2", "--nproc 4 --elastic 2:4"),
        ("-np 2 --min-np 2 --max-np 8 --reset-limit 5", "--nproc 2 --elastic 2:8 --retries 5:1000000000"),
        ("-np 4 --max-num-proc 6 -H a:2,b:2", "--where ssh --hosts a:2,b:2 --elastic 4:6"),
        ("-np 4 --min-np 2 --max-np 8 --host-discovery-script ./hosts.sh -p 2222 --blacklist-cooldown-range 60 90",
         "--where ssh --host-discovery-script ./hosts.sh --ssh-port 2222 --elastic 2:8 --cooldown 60"),
        ("-np 4 --reset-limit 5", "--nproc 4 --max-restarts 5"),
        ("-np 2 -H localhost:4 --network-interfaces eth1", "--nproc 2"),
    ],
)  # fmt: skip
def test_ranks_fill_hosts_in_order(text: str, arguments: str) -> None:
    command = translated(text)
    assert command.launch == ["--as-horovod", *arguments.split(), "train.py"]
    assert command.uses_ssh == ("ssh" in arguments)
    assert any("--network-interfaces" in note for note in command.notes) == ("localhost:4" in text)


def test_other_hosts_get_variables_that_do_not_describe_this_host() -> None:
    names = ["DATA", "HOME", "HOROVOD_TIMELINE", "PATH", "SSH_CONNECTION", "SHARDWISE_CORES", "BASH_FUNC_x%%", "_"]
    assert environment_arguments(names) == ["--env=DATA", "--env=HOROVOD_TIMELINE", "--env=PATH"]
