"""The clean stage: datatrove's filters, custom filters, and user functions.

Must not depend on deduplication, tokenizers or shards. Requires the extra `pipeline`, unless the
list of filters is empty.
"""
