"""Export of a checkpoint to a Hugging Face model directory with a model card, and to the hub.

Must not depend on the training loop, evaluation or reports.
"""
