"""The dedup, repeats and decontaminate stages: drop copies, repeated parts and evaluation text.

Documents are compared by hashes. Must not depend on filters, tokenizers or shards.
"""
