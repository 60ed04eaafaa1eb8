"""A fuzzer: mutated inputs of every kind, and the programs that read them, in this process."""
