"""Restartable tasks: phases with a record per task, run by local processes or Slurm.

A task may run on any machine that shares the file system, and its record lets later runs skip it.
Must not depend on what tasks do, or on other subpackages of data_prep.
"""
