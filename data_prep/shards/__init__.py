"""Finished token shards: merged, split, shuffled, resharded, and converted from other formats.

Works on token ids and document ends. Must not depend on raw text, filters, deduplication, pipelines
or the command line.
"""
