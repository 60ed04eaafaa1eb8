"""Logging of a run: metrics, events, console, and the trackers that copy them.

The files in the run directory are the record; trackers copy them. A tracker that fails is logged as
an event, and never ends a run. Must not depend on the model, the data or the checkpoints.
"""
