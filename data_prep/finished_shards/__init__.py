"""Finished token shards: shown, measured, split, and read from other formats.

Each format has a module, which does not use the format's own libraries. Works on token ids and
document ends; must not depend on raw text, filters, pipelines or the command line.
"""
