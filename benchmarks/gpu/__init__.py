"""`python -m benchmarks.gpu`: pretrain.py beside other training loops on one GPU.

`cases` says what is measured, `run_case` runs it, `table` shows it. `ceilings` and `checks` (with
`short_runs`) come first and are commands, too, as is `carry`, which collects wheels for a machine
without an index.
"""
