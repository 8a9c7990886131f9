"""Ranks on other hosts: an agent process on each host starts and ends its ranks, as the launcher orders."""
