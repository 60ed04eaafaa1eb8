"""What a run will do: settings resolved to numbers, its memory, and the Plan that ranks agree on.

Pure computation from parsed inputs; must not read files, write anything or start a process group.
"""
