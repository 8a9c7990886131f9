"""The pictures of the docs, each drawn from a real run or from what the library itself computes: `make pictures`.

Every picture is a function without arguments that measures, draws, and returns a figure. What it shows is found, not
typed: programs come from an engine, schedules and coordinates from the functions that training uses, times and bytes
from ranks that are processes.
"""
