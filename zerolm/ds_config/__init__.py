"""The DeepSpeed JSON: parsed once into a Profile, checked against DeepSpeed and the settings.

Only this subpackage reads the raw JSON. Must not depend on the model's weights or on data.
"""
