"""The training loop of one rank: steps, checkpoints, recovery, metrics.

Only pretrain.py may import it. `node_launcher` is a program, which starts ranks.
"""
