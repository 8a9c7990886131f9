"""Training that survives lost ranks: the survivors continue in the same processes, and replacements join."""
