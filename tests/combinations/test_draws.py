"""The draws of the campaign of combinations: all pairs, the same in every process."""

import itertools

from tests.combinations import draws


def test_the_draws_have_every_pair_that_is_not_excluded() -> None:
    found = set().union(*map(draws.pairs, draws.all_pairs()))
    for first, second in itertools.combinations(draws.FACTORS, 2):
        for values in itertools.product(draws.FACTORS[first], draws.FACTORS[second]):
            draw = {name: each[0] for name, each in draws.FACTORS.items()}
            draw |= dict(zip((first, second), values, strict=True))
            pair = (f"{first}={values[0]}", f"{second}={values[1]}")
            assert pair in found or draws.refused(draw) or _follows_from_a_third(*values), pair


def _follows_from_a_third(first: str, second: str) -> bool:
    """Lion needs an offload, which a default of `draw` above has not; likewise experts and fp8."""
    needs = ("lion", "on", *draws.FACTORS["experts"], *draws.EXPERTS)
    return first in needs or second in needs


def test_every_second_draw_is_known_to_plain_pytorch_and_none_is_excluded() -> None:
    found = [draws.draw_number(number) for number in range(200)]
    assert not any(map(draws.refused, found))
    for draw in found[1::2]:
        assert draws.PLAIN.items() <= draw.items()
    assert len({str(draw) for draw in found}) > 190
    complete, wanted = draws.coverage(found)
    assert complete == wanted
