"""The dedup, repeats and decontaminate stages: drop copies, repeated parts and evaluation text.

They compare documents by hashes. Must not depend on filters, tokenizers or
shards.
"""
