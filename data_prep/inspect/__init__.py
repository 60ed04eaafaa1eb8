"""Shows the content of token shards: sequences as text, and statistics.

Reads only shards and run directories. Must not depend on how shards are made, or on the command
line.
"""
