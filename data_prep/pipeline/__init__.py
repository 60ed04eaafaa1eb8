"""Pipelines from raw text to token shards: the recipe, plan, state, run and report.

Must not depend on the command line.
"""
