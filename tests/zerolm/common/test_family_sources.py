"""An edited file of transformers gives another digest, though its version is the same."""

import pytest
from transformers import AutoConfig

from tests.launching import LLAMA
from zerolm.common import family_sources
from zerolm.model.architecture import ConfigKey

LLAMA_MODULE = "transformers.models.llama.configuration_llama"


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A package of a few files in place of transformers."""
    for name in ("models/llama/modeling_llama.py", "integrations/sdpa.py", "masking_utils.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("causal = True\n")
    monkeypatch.setattr(family_sources, "_root", lambda: tmp_path)
    for each in (family_sources.shared_digest, family_sources.family_digest):
        monkeypatch.setattr(family_sources, each.__name__, each.__wrapped__)
    return tmp_path


def digests() -> list[str]:
    return [family_sources.shared_digest(), family_sources.family_digest(LLAMA_MODULE)]


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("models/llama/modeling_llama.py", [False, True]),
        ("integrations/sdpa.py", [True, False]),
        ("masking_utils.py", [True, False]),
        ("models/gpt2/modeling_gpt2.py", [False, False]),
    ],
)
def test_an_edit_changes_the_digest_of_the_models_that_it_concerns(library, name, changed):
    before = digests()
    (library / name).parent.mkdir(exist_ok=True)
    (library / name).write_text("causal = False\n")
    assert [new != old for new, old in zip(digests(), before, strict=True)] == changed


def test_other_modules_and_no_package_have_no_digest(library, monkeypatch):
    assert family_sources.family_digest("own.configuration.OwnConfig") == ""
    monkeypatch.setattr(family_sources, "_root", lambda: None)
    assert digests() == ["", ""]


def test_what_identifies_a_config_has_the_digest_of_its_family():
    key = ConfigKey.of(AutoConfig.for_model(**LLAMA))
    digest = family_sources.family_digest(LLAMA_MODULE)
    assert len(digest) == 32 and digest in key.inputs()
