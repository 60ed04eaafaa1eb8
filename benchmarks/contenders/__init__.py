"""Training loops that run beside pretrain.py, and the turns in which they run.

Each loop is a script of its own, which imports nothing of zerolm; `turns` starts and pauses them.
"""

LOOPS = "benchmarks/contenders"  # where the scripts are, in the repository
