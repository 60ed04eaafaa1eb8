"""DeepSpeed internals: its settings, where its optimizers store their state, and replaced methods.

Other subpackages use the engine only through its `Protocol`, the functions of these modules, and
DeepSpeed's documented API. Must not depend on any other part of zerolm.
"""
