"""Silent corruption: digests of states, suspicious steps, and recomputed steps.

Must not depend on the training loop, which passes in its results.
"""
