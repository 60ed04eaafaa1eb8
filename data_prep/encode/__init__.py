"""Encodes documents into token shards in two phases of restartable tasks, and packs shards.

Must not depend on filters, deduplication, pipelines or the command line.
"""
