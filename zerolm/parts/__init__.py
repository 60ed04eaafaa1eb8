"""All parts of a run that may be off, together: the settings with their flags, and their metrics.

Features and evaluations are above what they use, and this is above them: settings are parsed here,
and what is below reads them as `Settings`. Must not depend on trackers, nor on the training loop.
"""
