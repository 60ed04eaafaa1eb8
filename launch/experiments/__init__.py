"""Several runs as one experiment: sweeps over settings, and predictions of larger runs' losses.

They start runs by `zerolm train` only, and read what runs have written. Must not know how a run is
trained.
"""
