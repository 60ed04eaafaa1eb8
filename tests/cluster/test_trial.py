"""The draws of the campaign of faults on several hosts."""

from tests.cluster.trial import KINDS, draw


def test_trials_with_stages_have_the_faults_of_those_without_at_zero_1_and_2():
    drawn = [(draw(number), draw(number, has_stages=True)) for number in range(3 * len(KINDS))]
    for plain, with_stages in drawn:
        for name in ("kind", "mode", "hosts", "victim"):
            assert getattr(plain, name) == getattr(with_stages, name)
    assert {with_stages.stage for _, with_stages in drawn} == {1, 2}
    assert {plain.stage for plain, _ in drawn} == {2, 3}
    assert {with_stages.hosts for _, with_stages in drawn} == {2, 3}
