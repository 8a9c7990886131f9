"""Splits of the model itself: tensor, pipeline, sequence and expert parallelism."""
