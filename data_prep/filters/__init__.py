"""The clean stage: datatrove's filters, custom filters, and functions of the user.

Must not depend on deduplication, tokenizers or shards. Needs the extra `pipeline`, unless the list
of filters is empty.
"""
