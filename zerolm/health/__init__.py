"""A run's health: norms of weights and of their updates, and the gradient noise scale.

Must not depend on features or the training loop, which decide when to measure.
"""
