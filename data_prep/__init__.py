"""Prepares training data offline: raw text -> tokenizer -> token shards.

`zerolm data --help` lists the commands. May import zerolm below the training loop;
tests/test_ladder.py enforces it. No module imports torch, transformers, datasets or pyarrow at the
top: `--help` must be fast, and every worker process pays for each import.
"""
