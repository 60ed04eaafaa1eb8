"""What the tests of data_prep share: a tokenizer trained on the small corpus."""

from pathlib import Path

import pytest
from small_corpus import TEXTS

from data_prep.tokenizer_training import Recipe, train_tokenizer


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory) -> Path:
    """A byte-level BPE of 300 ids."""
    directory = tmp_path_factory.mktemp("tokenizer") / "bpe"
    train_tokenizer(TEXTS * 2, Recipe(300), directory, progress=False)
    return directory
