"""Reads documents from local files, hub datasets and the files of earlier stages.

Finds inputs, divides them into work units, and counts bad input. Must not depend on tokenizers,
shards, or where tasks run.
"""
