"""All optional parts of a run combined: the settings with their flags, and their metrics.

This subpackage is above features and evaluations in the import order: settings are parsed here, and
all code below reads them as `Settings`. Must not depend on trackers or the training loop.
"""
