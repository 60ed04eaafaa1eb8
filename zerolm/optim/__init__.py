"""Policies of the optimizer: schedules, parameter groups, spike detection.

Also finds optimizers by name. Must not depend on settings, or on DeepSpeed.
"""
