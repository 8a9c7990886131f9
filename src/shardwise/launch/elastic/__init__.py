"""Elastic jobs: the launcher decides which ranks continue, and starts replacements for dead ones."""
