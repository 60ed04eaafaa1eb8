"""The training loop of one rank: steps, checkpoints, recovery, metrics.

Used only by pretrain.py; nothing else in the project may import it.
"""
