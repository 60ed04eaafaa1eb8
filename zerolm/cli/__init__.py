"""The commands of `zerolm` for runs and models: one module each, named like the command.

A command describes its flags, calls the subpackage that does the work, and prints the result. No
other part of zerolm may depend on it. Heavy imports stay inside `run`, so that `--help` is instant.
"""
