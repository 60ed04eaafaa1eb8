"""Every command of docs/shards.md, run in order on small shards, as a user would."""

import re
import shlex

from data_prep.__main__ import main
from tests import ROOT
from tests.data_prep.shards.corpus import write_corpus


def test_every_command_of_the_page_runs(tmp_path, monkeypatch, tokenizer_directory, capfd):
    (tmp_path / "shards").mkdir()
    one, two = write_corpus(tmp_path, tokenizer_directory)
    one.rename(tmp_path / "shards/web")
    two.rename(tmp_path / "shards/code")
    (tmp_path / "tokenizer").symlink_to(tokenizer_directory)
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/shards.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    assert len(lines) > 6
    for line in lines:
        words = shlex.split(line.replace("--min_length 1000", "--min_length 100"), comments=True)
        assert words[:2] == ["zerolm", "data"]
        assert main(words[2:]) == 0, f"{line}\n{capfd.readouterr().err}"
