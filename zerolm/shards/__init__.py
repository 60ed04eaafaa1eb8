"""Token shards: the format on disk, its writer, and readers for local directories and stores.

Must not depend on torch, or on which tokens a run reads in which order.
"""
