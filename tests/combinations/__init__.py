"""A campaign of combinations: the settings of a run drawn together, and compared with what they
must not change.

A draw gives each factor (model, profile, ranks, recomputation, data, features, ...) a value; the
draws cover all pairs of values. Each is trained without interruption; killed and resumed on the
same topology, which must be equal in every bit; resumed on another topology, and, where a loop in
plain PyTorch knows its settings, trained by that loop: both must be equal within rounding. A draw
that `--check` refuses must be refused by the run, too.
"""
