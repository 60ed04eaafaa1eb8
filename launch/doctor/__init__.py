"""`python -m launch doctor`: check every host before a run starts there, and compare the hosts.

`collector` runs on each host and gathers facts; `checks` compares them without side effects. Must
not start a run, or leave anything behind on a host.
"""
