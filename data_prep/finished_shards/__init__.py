"""Finished token shards: shown, measured, split, and read from other formats.

A module for each format, whose libraries are not needed. Works on token ids and document ends; must
not depend on raw text, filters, pipelines or the command line.
"""
