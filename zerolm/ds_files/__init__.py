"""The files of DeepSpeed's checkpoints: which values are where, and their saving and loading.

Reads them without DeepSpeed, and into an engine of another topology. Must not depend on checkpoints
as this project publishes them.
"""
