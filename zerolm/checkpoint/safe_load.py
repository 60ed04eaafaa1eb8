"""The old name of `zerolm.ds_files.safe_load`, which reads DeepSpeed's files without running code.

External scripts import these two functions from here.
"""

from zerolm.ds_files.safe_load import pickle_problems, read_data

__all__ = ["pickle_problems", "read_data"]
