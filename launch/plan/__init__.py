"""`launch plan`: memory, time and price of a run before it starts, by the rules of pretrain.py.

Must not start the training loop except for `--probe`, which runs pretrain.py as a process.
"""
