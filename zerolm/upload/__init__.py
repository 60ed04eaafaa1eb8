"""A run's copy in an object store: background uploads, and restore.

Must not depend on the training loop.
"""
