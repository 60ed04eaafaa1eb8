"""The model: config, construction, initial weights, attention, loss, and estimates of its cost.

Must not depend on data, schedules, checkpoints or the training loop.
"""
