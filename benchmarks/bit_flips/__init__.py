"""`python -m benchmarks.bit_flips`: flips of single bits while a tiny model trains.

`tiny_run` starts the run, `experiment` sets it back and flips a bit of it.
"""
