"""`python -m benchmarks.transfer`: does the best learning rate stay the same at another size?

`__main__` trains many small models at the same time, `optima` finds the best rates and shows them.
`python -m benchmarks.transfer.coordinates` measures the size of activations instead.
"""
