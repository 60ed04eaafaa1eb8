"""`zerolm doctor`: check the hosts of a run before it starts, and compare them.

`collector` runs on each host and gathers facts; `checks` compares the facts without side effects.
Must not start a run or leave anything behind on a host.
"""
