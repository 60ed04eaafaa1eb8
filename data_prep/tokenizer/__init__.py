"""Loads, trains, measures and compares tokenizers, and encodes texts with them.

Must not depend on how token shards are written, on pipelines, or on the command line.
"""
