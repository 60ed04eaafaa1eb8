"""Supervision of a run from within its ranks: progress, heartbeats, hang detection, stack traces.

Must not depend on the training loop, which only records its progress here. Standard library only,
except for the watchdog thread: the supervisor and `status` read the same files.
"""
