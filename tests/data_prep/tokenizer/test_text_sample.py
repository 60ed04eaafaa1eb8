"""Samples of text: independent of the order of documents, bounded, nested, and fair to sources."""

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.tokenizer.text_sample import Sample


def sampled(documents, limit_bytes, sources=("one", "two")):
    sample = Sample(limit_bytes, sources)
    for source, text in documents:
        sample.add(source, text)
    return sample


def texts_of(sample):
    return sorted(text for each in sample.by_source().values() for text in each)


# A document too large for the sample, or a copy, must not let others in or out by its place.
DOCUMENTS = st.lists(
    st.tuples(st.sampled_from(["one", "two"]), st.integers(1, 30).map(lambda size: "é" * size)),
    min_size=1,
    max_size=20,
)


@settings(max_examples=300, deadline=None)
@given(DOCUMENTS, st.integers(1, 100), st.randoms(use_true_random=False))
def test_a_sample_does_not_depend_on_the_order(documents, limit_bytes, rng) -> None:
    first = sampled(documents, limit_bytes)
    shuffled = rng.sample(documents, len(documents))
    second = sampled(shuffled, limit_bytes)
    for name, texts in first.by_source().items():
        assert sorted(texts) == sorted(second.by_source()[name])
    assert first.kept_bytes == second.kept_bytes == sum(2 * len(text) for text in texts_of(first))
    distinct = set(texts_of(first))
    assert distinct and (len(distinct) == 1 or first.kept_bytes <= limit_bytes)
    kept = [text for _, text in documents if text in distinct]
    assert sorted(kept) == texts_of(first), "copies are sampled together"


@settings(max_examples=200, deadline=None)
@given(DOCUMENTS, st.integers(1, 100), st.integers(1, 100))
def test_a_larger_sample_contains_a_smaller_one(documents, one, two) -> None:
    small, large = sampled(documents, min(one, two)), sampled(documents, max(one, two))
    assert set(texts_of(small)) <= set(texts_of(large))
    assert large.by_source(small.limit_bytes) == small.by_source()


def test_each_source_has_its_share_of_the_text() -> None:
    rng = random.Random(3)
    small = [("few large", f"{number} " + "x" * 20_000) for number in range(200)]
    large = [("many small", f"{number} " + "y" * rng.randrange(200)) for number in range(40_000)]
    sample = sampled([*small, *large], 1_000_000, ("few large", "many small"))
    sizes = {name: sum(map(len, texts)) for name, texts in sample.by_source().items()}
    share = 200 * 20_003 / sample.num_bytes
    assert 0.9 * share < sizes["few large"] / sample.kept_bytes < 1.1 * share
    assert 950_000 < sample.kept_bytes <= 1_000_000 and sample.num_documents == 40_200
    numbers = [int(text.split()[0]) for text in sample.by_source()["many small"]]
    assert 19_000 < np.mean(numbers) < 21_000, "they come from everywhere"
