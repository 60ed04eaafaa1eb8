"""The dedup and decontaminate stages: drop exact copies, near-duplicates and evaluation text.

Both compare documents by hashes of their words. Must not depend on filters, tokenizers or shards.
"""
