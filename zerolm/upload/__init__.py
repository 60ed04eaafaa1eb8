"""The copy of a run in an object store: uploads in the background, and restore.

Must not depend on the training loop.
"""
