"""`python -m benchmarks.transfer`: does the best learning rate stay the same at another size?

`__main__` trains many small models concurrently, `optima` finds and shows the best rates. `python
-m benchmarks.transfer.coordinates` measures the size of activations instead.
"""
