"""The dedup and decontaminate stages: drop exact copies, near-duplicates and evaluation text.

Both compare documents by the hashes of their words. Must not depend on filters, tokenizers or
shards.
"""
