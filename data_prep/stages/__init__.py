"""What clean, dedup and decontaminate share: input documents, output files, counts and checks.

The checks are those of a stage's options and output directory. Must not depend on why a stage keeps
or drops a document.
"""
