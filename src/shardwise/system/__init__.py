"""The machine and the process: devices, disks, memory, safe files, tokens, ranks of launchers, counters."""
