"""Foundations: errors, values, files, locks, processes, object stores, metric and event tables.

Must not depend on any other subpackage, nor import torch or DeepSpeed when it is imported.
"""
