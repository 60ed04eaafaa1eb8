"""Reads DeepSpeed's files without running their code: `zerolm.engine.safe_load` by its old name.

Scripts outside import these two from here.
"""

from zerolm.engine.safe_load import pickle_problems, read_data

__all__ = ["pickle_problems", "read_data"]
