"""What several tests of preflight read."""

from pathlib import Path

import pytest

from tests.zerolm.preflight.preflight_inputs import write_inputs


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))
