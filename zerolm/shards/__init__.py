"""Token shards: the format on disk, its writer, and readers for local directories and stores.

Must not depend on torch, or on the order in which a run reads tokens.
"""
