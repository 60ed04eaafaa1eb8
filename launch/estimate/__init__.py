"""`launch plan`: estimates the memory, time and price of a run before it starts.

Uses the rules and defaults of pretrain.py. Must not train, except that `--probe` runs pretrain.py
in a child process.
"""
