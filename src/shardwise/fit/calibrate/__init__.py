"""Measures this machine's tiers: disks, host memory, links. `shardwise bench disk|host|links` prints the results."""
