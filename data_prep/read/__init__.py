"""Reading of inputs: local files, hub data sets and the files of earlier stages become documents.

Inputs are found, divided into work units and parsed here, and bad input is counted. Must not depend
on tokenizers or shards, nor on where tasks run.
"""
