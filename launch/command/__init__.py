"""Arguments, flag types and environment of `deepspeed ... pretrain.py ...` commands.

Shared by all `launch` commands. Must not import other `launch` subpackages, torch or DeepSpeed.
"""
