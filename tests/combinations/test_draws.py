"""The draws of the campaign of combinations: all pairs, the same in every process."""

import itertools

from tests.combinations import draws


def test_the_draws_have_every_pair_that_is_not_excluded() -> None:
    found = draws.all_pairs()
    assert not any(map(draws.refused, found))
    for first, second in itertools.combinations(draws.FACTORS, 2):
        met = {(draw[first], draw[second]) for draw in found}
        for values in itertools.product(draws.FACTORS[first], draws.FACTORS[second]):
            pair = (f"{first}={values[0]}", f"{second}={values[1]}")
            assert (values in met) == (pair in draws.possible_pairs()), pair


def test_every_second_draw_is_known_to_plain_pytorch_and_none_is_excluded() -> None:
    found = [draws.draw_number(number) for number in range(2 * len(draws.all_pairs()))]
    for number, draw in enumerate(found):
        if number % draws.ANY == draws.ANY - 1:
            continue
        assert not draws.refused(draw)
        assert number % 2 == 0 or draws.PLAIN.items() <= draw.items()
    assert len(set(map(str, found))) > 190
    complete, wanted = draws.coverage(found)
    assert complete == wanted
