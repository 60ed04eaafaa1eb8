"""The commands of `python -m data_prep` and `zerolm data`: one module each, named like the command.

A command checks its flags and files, calls the room that does the work, and prints the result.
Nothing of data_prep may depend on it.
"""
