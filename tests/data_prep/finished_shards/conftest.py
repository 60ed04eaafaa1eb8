"""Files that the peers wrote, and shards with the same documents."""

from pathlib import Path

import numpy as np
import pytest

from tests.data_prep.finished_shards.conversions import DOCUMENTS, EOS, open_eos, write_peer_files
from tests.data_prep.finished_shards.corpus import write_corpus
from zerolm.shards.writer import ShardWriter


@pytest.fixture(scope="module")
def peers(tmp_path_factory) -> Path:
    """The files that the peers wrote."""
    return write_peer_files(tmp_path_factory.mktemp("peers"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, tokenizer_directory):
    one, two = write_corpus(tmp_path_factory.mktemp("corpus"), tokenizer_directory)
    return one, two, tokenizer_directory


@pytest.fixture
def shards(tmp_path, tokenizer_directory) -> Path:
    """The documents that the peers' files have, as shards."""
    assert open_eos(tokenizer_directory) == EOS
    with ShardWriter(
        tmp_path / "shards", vocab_size=300, eos_id=EOS, tokenizer={"fingerprint": "f"}
    ) as writer:
        for ids in DOCUMENTS:
            writer.add(np.array(ids))
    return tmp_path / "shards"
