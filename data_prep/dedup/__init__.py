"""The dedup and decontaminate stages: drop copies of documents, and evaluation text.

Documents are compared by hashes. Must not depend on filters, tokenizers or shards.
"""
