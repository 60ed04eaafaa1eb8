"""Find every problem of a run before a process group exists, or return its `Plan`.

Reads files and the machine, writes nothing. Must not depend on the training loop.
"""
