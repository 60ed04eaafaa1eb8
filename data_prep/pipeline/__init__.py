"""Pipelines from raw text to token shards: recipes, their plan and state, and the report.

Must not depend on the command line, which runs the stages.
"""
