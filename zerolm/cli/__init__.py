"""The commands of `zerolm` for runs and models: one module each, named like the command.

A command declares its flags, calls the subpackage that does the work, and prints the result. No
other part of zerolm may depend on commands. Heavy imports stay inside `run`, so `--help` is
instant.
"""
