"""The commands of `python -m data_prep` and `zerolm data`: one module each, named like the command.

A command checks its flags and files, calls the subpackage that does the work, and prints results.
No other subpackage of data_prep may import this one.
"""
