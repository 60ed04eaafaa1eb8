"""Shared by clean, dedup and decontaminate: input documents, output files, counts, and checks.

The checks cover a stage's options and output directory. Must not depend on why a stage keeps or
drops a document.
"""
