"""A campaign of kills: runs with random faults, each compared in every bit with one without them.

A chunk of the campaign is one such run, and one line of its log. Of `zerolm` it uses the points of
`zerolm.common.faults`, the events, and the inspection of processes; the comparison reads the files
with plain json and torch.
"""
