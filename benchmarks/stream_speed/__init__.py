"""`python -m benchmarks.stream_speed`: `TokenStream` compared with other readers of token shards.

`copies` writes the same IDs in each reader's format, `readers` reads them in a new process.
"""
