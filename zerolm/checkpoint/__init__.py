"""Checkpoints on disk: written in the background, verified, loaded, resharded, rolled back.

Must not depend on the training loop or on trackers.
"""
