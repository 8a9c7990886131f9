"""What this machine's tiers give, measured: disks, host memory, links. `shardwise bench disk|host|links` prints it."""
