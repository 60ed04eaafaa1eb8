"""The arrays that the tasks of dedup exchange."""

import errno
import resource

import numpy as np
import pytest

from data_prep.dedup.arrays import BAND, load_array, save_array


@pytest.mark.parametrize("rows", [0, 3, 100_000])
def test_an_array_is_read_as_it_was_written(tmp_path, rows) -> None:
    array = np.zeros(rows, BAND)
    array["hash"] = np.arange(rows)
    save_array(tmp_path / "kind" / "00000.npy", array)
    assert np.array_equal(load_array(tmp_path / "kind" / "00000.npy"), array)


def test_an_array_that_does_not_fit_names_the_reason(tmp_path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(OSError) as raised:
            save_array(tmp_path / "00000.npy", np.zeros(100_000, BAND))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raised.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []
