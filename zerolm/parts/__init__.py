"""All optional parts of a run combined: the settings with their flags, and their metrics.

This subpackage is above features and evaluations, which are above what they use: settings are
parsed here, and everything below reads them as `Settings`. Must not depend on trackers or the
training loop.
"""
