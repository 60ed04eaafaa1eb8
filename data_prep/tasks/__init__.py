"""Restartable tasks: phases with a record per task, run by local processes or Slurm.

Each task runs once, on any machine that shares the file system, and its record lets a later run
skip it. Must not depend on what the tasks do, or on other subpackages of data_prep.
"""
