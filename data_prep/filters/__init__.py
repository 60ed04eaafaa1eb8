"""The clean stage: documents pass through datatrove's filters, our own and the user's functions.

Must not depend on deduplication, tokenizers or shards. Needs the extra `pipeline`, unless the list
of filters is empty.
"""
