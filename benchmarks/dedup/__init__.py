"""`python -m benchmarks.dedup`: deduplication compared with brute force and other libraries.

`contenders` runs the programs that find duplicates.
"""
