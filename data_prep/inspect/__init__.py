"""Shows the content of token shards: sequences as text, and statistics.

Reads only shards and run directories. Must not depend on raw text, or on the command line.
"""
