"""A recipe from WARC archives and HTML pages to packed shards, killed three times on the way."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from data_prep.read.stage_files import read_stage
from tests.launching import environment
from tests.web_pages import library_pages, page, topic_pages, write_warc
from zerolm.shards.manifest import read_manifest

FOX = "The quick brown fox jumps over the lazy dog, and the dog does not mind it at all. "
RECIPE = {
    "output": "out",
    "sources": {
        "crawl": {"input": ["crawl"], "on_bad_input": "skip", "max_bad_fraction": 0.05},
        "pages": {"input": ["pages/*.html"], "val_fraction": 0.1},
    },
    "clean": {
        "filters": [{"filter": "length", "min_words": 20}, {"filter": "gopher_repetition"}],
        "unit_bytes": 40_000,
        "keep_dropped": True,
    },
    "dedup": {},
    "train_tokenizer": {"vocab_size": 2000},
    "tokenize": {"val_fraction": 0.05},
    "pack": {"seq_len": 128},
}
TIMED = ("report.json", "report.html", "records/")  # seconds, hosts


@pytest.fixture
def recipe(tmp_path):
    """Write two archives with a damaged record and pages twice, single pages, and a recipe."""
    (tmp_path / "crawl").mkdir()
    (tmp_path / "pages").mkdir()
    pages = topic_pages(150)
    write_warc(tmp_path / "crawl" / "0.warc.gz", [*pages[:90], *library_pages(40)])
    archive = write_warc(tmp_path / "crawl" / "1.warc.gz", [*pages[60:], *pages[:5]])
    data = bytearray(archive.read_bytes())
    data[len(data) // 2] ^= 64
    archive.write_bytes(data)
    for number, (_, content) in enumerate([*library_pages(60), *pages[:9]]):
        (tmp_path / "pages" / f"{number:03}.html").write_bytes(content)
    western = page("western", "Größe über café. " + FOX * 9, "cp1252")
    (tmp_path / "pages" / "western.html").write_bytes(western)
    (tmp_path / "pages" / "empty.html").write_bytes(b"<html><script>1</script></html>")
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(RECIPE))
    return path


def start(recipe):
    return subprocess.Popen(
        [sys.executable, "-m", "data_prep", "run", str(recipe), "--workers", "2"],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


def group_is_gone(process):
    """Wait until no worker and no child of a worker is left."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def kill_when(recipe, happened):
    """Run the recipe and kill its main process when a file is there; return what is left."""
    process = start(recipe)
    deadline = time.monotonic() + 300
    while not happened() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    assert process.poll() is None, process.communicate()[0]
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert group_is_gone(process)


def contents(output):
    return {
        str(path.relative_to(output)): path.read_bytes()
        for path in output.rglob("*")
        if path.is_file() and not any(part in str(path.relative_to(output)) for part in TIMED)
    }


@pytest.mark.soak
def test_three_kills_on_the_way_from_pages_to_shards_change_no_byte(recipe):
    process = start(recipe)
    assert process.communicate(timeout=600)[1] is None and process.returncode == 0
    output = recipe.parent / "out"
    expected = contents(output)
    crawl, pages = (read_stage(output / name / "clean").manifest for name in ("crawl", "pages"))
    assert crawl["reading"]["bad"] == {"damaged": 1} and crawl["documents_in"] == 90 + 40 + 94
    assert pages["reading"]["skipped"] == {"no_main_text": 1} and pages["documents_in"] == 70
    assert crawl["documents_out"] > read_stage(output / "crawl" / "dedup").manifest["documents_out"]
    assert read_manifest(output / "crawl" / "shards")["num_tokens"] > 50_000
    assert sum("shard-" in name for name in expected) > 8
    shutil.move(output, recipe.parent / "undisturbed")

    kill_when(recipe, lambda: any((output / "crawl" / "clean").glob("records/*/*.json")))
    kill_when(recipe, lambda: any((output / "pages" / "clean").glob("*.tmp")))
    kill_when(recipe, lambda: (output / "crawl" / "shards").is_dir())
    process = start(recipe)
    shown = process.communicate(timeout=600)[0]
    assert process.returncode == 0 and "crawl/clean: is complete" in shown, shown
    found = contents(output)
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []
