"""Job files for Slurm, Kubernetes and SkyPilot, and the command that they start on each node.

The files name secrets but never contain them. Must not inspect this machine or import torch.
"""
