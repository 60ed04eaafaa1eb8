"""DeepSpeed's JSON: parsed once into a Profile, checked against DeepSpeed and against the settings.

Only this subpackage reads the raw JSON. Must not depend on the model's weights or on data.
"""
