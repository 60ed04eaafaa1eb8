"""Shared by the tests of data_prep: a tokenizer trained on the small corpus."""

from pathlib import Path

import pytest

from data_prep.tokenizer.bpe import BpeOptions, train_bpe
from tests.data_prep.small_corpus import TEXTS


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory) -> Path:
    """A byte-level BPE of 300 ids."""
    directory = tmp_path_factory.mktemp("tokenizer") / "bpe"
    train_bpe(TEXTS * 2, BpeOptions(300), directory, progress=False)
    return directory
