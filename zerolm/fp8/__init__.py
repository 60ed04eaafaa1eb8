"""`--fp8`: linear layers that multiply in 8-bit floating point during training.

Must not depend on data, the optimizer or the training loop.
"""
