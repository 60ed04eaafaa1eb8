"""`python -m benchmarks.dedup`: deduplication beside brute force and other libraries.

`contenders` runs what finds duplicates.
"""
