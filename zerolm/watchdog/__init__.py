"""Supervision of a run from inside its ranks: progress, heartbeats, hang detection, stack traces.

Must not depend on the training loop, which only records its progress here. Apart from the watchdog
thread itself, standard library only: the supervisor and `status` read the same files.
"""
