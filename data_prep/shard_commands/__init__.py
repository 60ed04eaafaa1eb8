"""The commands of `zerolm data` that work on finished token shards, named like the command.

As in `data_prep.cli`: a command checks its flags, calls the subpackage that does the work, and
prints results. No other subpackage of data_prep may import this one.
"""
