"""The attention kernel of a run: what each kernel supports, and the choice of `auto`.

Must not depend on data, the plan or the training loop.
"""
