"""Silent corruption: digests of states, suspicious steps, and steps computed twice.

Must not depend on the training loop, which passes in what it computes.
"""
