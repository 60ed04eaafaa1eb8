"""Other formats of token ids: read into token shards, and written from them, by streaming.

A module for each format, whose libraries are not needed. Must not depend on raw text, pipelines or
the command line.
"""
