"""`python -m benchmarks.converters`: converted shards beside the libraries of their formats.

`peers` reads and writes each format with the library that defines it.
"""
