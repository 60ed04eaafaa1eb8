"""`launch plan`: estimates the memory, time and price of a run before it starts.

Applies pretrain.py's rules and defaults. Must not train.
"""
