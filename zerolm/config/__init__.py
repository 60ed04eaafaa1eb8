"""What a user can set: flags and the settings file, their types, bounds, help and defaults.

Must not depend on the model, the data, torch or DeepSpeed, so that `--help` is instant.
"""
