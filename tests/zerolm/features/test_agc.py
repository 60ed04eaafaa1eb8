"""`--agc` is refused where norms of single parameters cannot be computed, or mean nothing."""

import pytest
from transformers import AutoConfig

from zerolm.distributed.layout import Layout
from zerolm.ds_config.profile import Profile
from zerolm.features.agc import Agc
from zerolm.features.feature import Case
from zerolm.parts.settings import RunSettings

NVME = {"device": "nvme", "nvme_path": "/nvme"}
ADAMW, MUON = ({"optimizer": {"type": kind}} for kind in ("AdamW", "Muon"))


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (ADAMW, ""),
        (ADAMW | {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}, ""),
        (MUON, "Use AdamW, or remove the flag"),
        *(
            (ADAMW | {"zero_optimization": {"stage": 3, block: NVME}}, f"has {text} on NVMe")
            for block in ("offload_optimizer", "offload_param")
            for text in (f"zero_optimization.{block}",)
        ),
    ],
    ids=str,
)
def test_agc_is_refused_by_name_with_what_hides_norms(config, part):
    def found(settings):
        profile = Profile.parse(config, "ds.json")
        model = AutoConfig.for_model("llama")
        return list(Agc.problems(Case(settings, model, profile, Layout(2), "cpu")))

    problems = found(RunSettings(deepspeed_config="ds.json", agc=0.01))
    assert [part in problem for problem in problems] == [True] * bool(part)
    assert all("--agc" in problem and "ds.json" in problem for problem in problems)
    assert not found(RunSettings(deepspeed_config="ds.json"))
