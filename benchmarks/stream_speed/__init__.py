"""`python -m benchmarks.stream_speed`: `TokenStream` beside other readers of token shards.

`copies` writes the same IDs in the format of each reader, `readers` reads them in a new process.
"""
