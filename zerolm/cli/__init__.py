"""The commands of `zerolm` for runs and models: one module each, named like the command.

A command describes its flags, calls the room that does the work, and prints the result. Nothing of
zerolm may depend on it; heavy imports stay inside `run`, so that `--help` is instant.
"""
