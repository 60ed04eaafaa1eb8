"""Offline: raw text -> tokenizer -> token shards. `python -m data_prep --help` shows the commands.

May import rung 0 of zerolm (errors, files, shards, order) and nothing else of it. Nothing here
imports torch, transformers, datasets or pyarrow at the top of a module: `--help` has to be quick,
and every worker process pays for what is imported.
"""
