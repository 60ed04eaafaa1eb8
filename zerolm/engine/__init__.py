"""The inside of DeepSpeed: what it reads, where its optimizers keep what, what of it is replaced.

Other subpackages know the engine by its `Protocol` and by the functions of these modules, and
besides them DeepSpeed's documentation only. Must not depend on any other part of zerolm.
"""
