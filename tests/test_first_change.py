"""The change of docs/first_change.md works as the page says, in a copy of the package."""

import shutil
import subprocess
import sys

from tests import ROOT
from tests.documents import blocks, text_of


def test_the_first_change_is_a_flag_with_a_test_that_passes(tmp_path):
    module, test = blocks(text_of(ROOT / "docs" / "first_change.md"), "python")
    for package in ("zerolm", "data_prep", "launch"):
        shutil.copytree(ROOT / package, tmp_path / package)
    features = tmp_path / "zerolm" / "features"
    (features / "centering.py").write_text(module)
    listed = (
        (features / "__init__.py").read_text().replace("    ZLoss,\n", "    ZLoss, Centering,\n")
    )
    line = "from zerolm.features.z_loss import ZLoss\n"
    imported = line + "from zerolm.features.centering import Centering\n"
    (features / "__init__.py").write_text(listed.replace(line, imported))
    (tmp_path / "test_centering.py").write_text(test)
    for words in (["pytest", "-q", "test_centering.py"], ["zerolm", "train", "--help", "all"]):
        result = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=tmp_path, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert result.returncode == 0, result.stdout + result.stderr
    assert "--centering" in result.stdout
