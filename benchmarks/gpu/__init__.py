"""`python -m benchmarks.gpu`: pretrain.py compared with other training loops on one GPU.

`cases` defines the measurements, `run_case` runs one, `table` shows the results. `ceilings` and
`checks` (with `short_runs`) run first and are also commands, as is `carry`, which collects wheels
for a machine without a package index.
"""
