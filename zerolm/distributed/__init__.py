"""Process groups, collective operations and the parallel layout of the ranks.

Must not depend on the model, the data or the training loop. Modules import torch lazily where
preflight imports them.
"""
