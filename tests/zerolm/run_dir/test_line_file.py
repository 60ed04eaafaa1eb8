"""A log that a full disk does not end."""

import errno
import shutil

import pytest

from zerolm.run_dir.jsonl import LineFile


class Disk:
    """A raw file with so much room, that takes what fits of each write."""

    def __init__(self, file, room: int):
        self.file, self.room = file, room

    def write(self, data: bytes) -> int:
        fits = min(self.room, len(data))
        if not fits:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= fits
        return self.file.write(data[:fits])

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_lines_wait_for_room_and_come_whole_and_in_order(tmp_path):
    told = []
    log = LineFile(tmp_path / "log", told.append)
    log._file = Disk(log._file, room=8)
    for line in ("first", "second", "third"):
        log.write(line)
    assert (tmp_path / "log").read_text() == "first\nse"
    assert len(told) == 1 and "No space left on device" in told[0]
    with pytest.raises(OSError, match=r"No space left|some lines"):
        log.sync()
    log._file.room = 1000
    log.write("fourth")
    log.sync()
    log.close()
    assert (tmp_path / "log").read_text() == "first\nsecond\nthird\nfourth\n"
    assert len(told) == 1


def test_what_never_fits_is_told(tmp_path):
    told = []
    log = LineFile(tmp_path / "log", told.append)
    log._file = Disk(log._file, room=3)
    log.write("first")
    log.write("second")
    log.close()
    assert told[-1].endswith("2 lines could not be written and are lost") and log.closed


def test_the_device_that_is_always_full_ends_nothing(tmp_path):
    told = []
    log = LineFile("/dev/full", told.append)
    log.write("first")
    log.write("second")
    log.close()
    assert len(told) == 2 and "2 lines" in told[1]


def test_a_removed_file_is_written_again_with_all_of_its_lines(tmp_path):
    told = []
    path = tmp_path / "log"
    log = LineFile(path, told.append)
    log.write("first")
    path.unlink()
    log.write("second")
    log.sync()
    assert path.read_text() == "first\nsecond\n"
    assert told == [f"{path}: was removed while the run writes to it; written again"]
    log.write("third")
    log.sync()
    log.close()
    assert path.read_text() == "first\nsecond\nthird\n" and len(told) == 1


def test_a_removed_file_waits_for_room_on_the_disk(tmp_path, monkeypatch):
    path = tmp_path / "log"
    log = LineFile(path, print)
    log.write("first")
    path.unlink()
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(shutil, "copyfileobj", lambda source, to: Disk(to, room=0).write(b"x"))
        log.sync()
    log.write("second")
    log.sync()
    log.close()
    assert path.read_text() == "first\nsecond\n"


def test_a_file_that_is_saved_from_an_editor_is_continued(tmp_path):
    told = []
    path, edited = tmp_path / "log", tmp_path / "log.swp"
    log = LineFile(path, told.append)
    log.write("first")
    edited.write_text("edited\n")
    edited.rename(path)
    log.sync()
    log.write("second")
    log.close()
    assert path.read_text() == "edited\nsecond\n"
    assert len(told) == 1 and "was replaced while the run writes to it" in told[0]
