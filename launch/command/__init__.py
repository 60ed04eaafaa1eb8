"""Arguments, flag types and environment of `deepspeed ... pretrain.py ...` commands.

Shared by all `launch` commands. Must not import another `launch` subpackage, torch or DeepSpeed.
"""
