"""The data of a run: its sources, their mixture, the order of sequences, and the batches.

Must not depend on the model beyond the ignored target id, or on the training loop. The order is
pure arithmetic on (seed, sources, blends, sequence number): see docs/data_order.md.
"""
