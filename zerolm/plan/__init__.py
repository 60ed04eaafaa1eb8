"""The plan of a run: settings resolved to numbers, memory per rank, and the `Plan` itself.

Works on parsed inputs; must not read or write files or start a process group.
"""
