"""Fewer points that look the same: of each stretch of a curve its lowest and highest stay. Pure."""

import math
from collections.abc import Sequence


def kept(values: Sequence[float], most: int) -> list[int]:
    """Return which points of a curve to keep, ascending: all, if there are no more than `most`.

    Else the curve is cut into stretches, and of each the lowest, the highest, and the first point
    without a value (NaN: a gap in the curve) stay, and so do both ends of the curve. Whatever
    stands out in the curve stands out in what is kept.

    Args:
        values: (N,), NaN where there is none.
        most: points to keep, except that gaps come on top.
    """
    count = len(values)
    if count <= most:
        return list(range(count))
    stretches = max(1, (most - 2) // 2)
    chosen = {0, count - 1}
    for number in range(stretches):
        stretch = range(count * number // stretches, count * (number + 1) // stretches)
        finite = [index for index in stretch if math.isfinite(values[index])]
        if finite:
            chosen.add(min(finite, key=values.__getitem__))
            chosen.add(max(finite, key=values.__getitem__))
        if len(finite) < len(stretch):
            chosen.add(next(index for index in stretch if not math.isfinite(values[index])))
    return sorted(chosen)
