"""Find all problems with a run before a process group exists, or return its `Plan`.

Reads files and inspects the machine, but writes nothing. Must not depend on the training loop.
"""
