"""Job files for Slurm, and the command that schedulers run on each node.

The files name secrets but never contain them. Must not inspect this machine or import torch.
"""
