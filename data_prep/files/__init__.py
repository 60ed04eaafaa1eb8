"""Input files before their format is known: opened, decompressed, decoded, and split into lines.

Also the types of inputs, chunks, documents and problems. Must not depend on formats, or on how
inputs are found and divided.
"""
