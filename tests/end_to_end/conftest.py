"""The model and data of the end-to-end tests: a tiny Llama and a small corpus."""

from pathlib import Path

import pytest

from tests.launching import LLAMA, write_json, write_shards


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    return write_shards(tmp_path_factory.mktemp("corpus") / "counting")


@pytest.fixture(scope="session")
def held_out(tmp_path_factory) -> Path:
    return write_shards(tmp_path_factory.mktemp("held_out") / "counting", 40, seed=1)


@pytest.fixture(scope="session")
def llama(tmp_path_factory) -> Path:
    return write_json(tmp_path_factory.mktemp("models") / "llama.json", LLAMA)
