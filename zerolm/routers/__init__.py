"""Mixture-of-experts routers: their biases, metrics and adjustments in each step.

Must not depend on data, the optimizer or the training loop.
"""
