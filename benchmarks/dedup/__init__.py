"""`python -m benchmarks.dedup`: deduplication beside brute force and other libraries.

`texts` makes corpora and compares all pairs of documents, `contenders` runs what finds duplicates.
"""
