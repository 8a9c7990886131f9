"""Training that survives its ranks: those that live go on in the same processes, and others come in."""
