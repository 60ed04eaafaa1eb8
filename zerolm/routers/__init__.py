"""The routers of a mixture of experts: their biases, and what each step measures and adjusts.

Must not depend on data, the optimizer or the training loop.
"""
