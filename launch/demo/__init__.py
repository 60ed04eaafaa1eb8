"""The corpus of launch/demo.sh, and the check that its run has learned.

Standard library only: must not import `zerolm`, `data_prep` or the rest of `launch`.
"""
