"""The ranks of a run: their devices, process group, collective operations and parallel layout.

Must not depend on the model, the data or the training loop. Modules that preflight uses import
torch lazily.
"""
