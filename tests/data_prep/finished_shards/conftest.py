"""Files that the peers wrote, and shards of texts."""

from pathlib import Path

import pytest

from tests.data_prep.finished_shards.conversions import write_peer_files
from tests.data_prep.finished_shards.corpus import write_corpus


@pytest.fixture(scope="module")
def peers(tmp_path_factory) -> Path:
    """The files that the peers wrote."""
    return write_peer_files(tmp_path_factory.mktemp("peers"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, tokenizer_directory):
    one, two = write_corpus(tmp_path_factory.mktemp("corpus"), tokenizer_directory)
    return one, two, tokenizer_directory
