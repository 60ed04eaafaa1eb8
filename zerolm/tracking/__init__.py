"""Logging of a run: metrics, events, console, and trackers.

The files in the run directory are the record, which trackers copy. If a tracker fails, the failure
is logged as an event, and the run continues. Must not depend on the model, the data or the
checkpoints.
"""
