"""Races against the peers: the same model, data and optimizer, one engine at a time."""
