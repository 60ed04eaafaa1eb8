"""Finished token shards: divided, and written from other formats.

Works on token ids and document ends. Must not depend on raw text, filters, deduplication, pipelines
or the command line.
"""
