"""Logging of a run: metrics, events, console, and the trackers that copy them.

The files of the run directory are the truth: a tracker that fails is an event, never the end of a
run. Must not depend on the model, the data or the checkpoints.
"""
