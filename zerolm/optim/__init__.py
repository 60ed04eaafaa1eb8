"""Optimizer policies: schedules, parameter groups, spike detection.

Also finds optimizers by name. Must not depend on settings or DeepSpeed.
"""
