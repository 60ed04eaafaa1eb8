"""Shows what is in token shards: sequences as text, and statistics.

Reads shards and run directories only. Must not depend on how shards are made or on the command
line.
"""
