"""The contract of a run directory: names of files, rows, metrics, events and records.

A run writes these; reports, trackers and the supervisor read them. Standard library only; must not
depend on settings, writers or readers.
"""
