"""The contract of a run directory: names of files, rows, metrics, events and records.

What a run writes and what reports, trackers and the supervisor read. Standard library only; must
not depend on settings, nor on what writes or reads.
"""
