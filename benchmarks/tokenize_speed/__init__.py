"""`python -m benchmarks.tokenize_speed`: `data_prep tokenize` beside other tokenizing tools.

`corpus` writes the text; `tools` runs a peer as its documentation says, and reads what it wrote.
"""
