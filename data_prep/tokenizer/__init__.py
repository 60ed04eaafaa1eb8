"""Tokenizers: load, train, encode, measure and compare them.

Must not depend on how token shards are written, on pipelines, or on the command line.
"""
