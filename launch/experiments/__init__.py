"""Experiments with several runs: sweeps over settings, and predictions of larger runs' losses.

They start runs only with `zerolm train`, and read the files that runs write. Must not depend on how
a run is trained.
"""
