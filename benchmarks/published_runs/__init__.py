"""Throughputs that others have published, beside the plan's predictions of them."""
