"""The inside of DeepSpeed: where its optimizers keep what, and which of its methods are replaced.

Other subpackages know the engine by its `Protocol` and by the functions of these modules. Must not
depend on settings, the model, data or checkpoints' directories.
"""
