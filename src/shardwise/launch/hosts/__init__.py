"""Ranks on other hosts: a process on each starts and ends its ranks, and one here tells them what to do."""
