"""Evaluation of a model: validation loss, HellaSwag, tasks of lm-eval, and generated samples.

Runs inside training on all ranks, or on an exported model in one process. Must not depend on
checkpoints or the training loop.
"""
