"""`python -m benchmarks.tokenize_speed`: `data_prep tokenize` compared with other tools.

`corpus` writes the text; `tools` runs a peer as documented, and reads its output.
"""
