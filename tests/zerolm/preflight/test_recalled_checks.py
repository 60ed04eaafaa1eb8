"""`--check` with what an earlier one has found: the same lines, without the model's libraries."""

import pytest

from tests.zerolm.preflight.preflight_inputs import command
from tests.zerolm.preflight.test_checks import GOLDEN
from zerolm.common import remembered
from zerolm.common.errors import ConfigError
from zerolm.model import model as models
from zerolm.preflight import check, checks

GOOD = {
    "dense": "",
    "mixture": "--model_config mixtral.json --deepspeed_config fp32.json --global_router_loss",
    "documents": "--model_config mistral.json --document_mask --val_data val",
    "dropout": "--model_config dropout.json",
    "of GPUs": "--world_size 8 --hardware H100",
    "stages": "--deepspeed_config stages.json --world_size 2",
    "padding": "--model_config padding.json",
}
REFUSED = {str(number): GOLDEN[number]["change"] for number in range(len(GOLDEN))} | {
    "divided": "--expert_parallel 2 --world_size 2",
    "positions": "--seq_len 128 --batch_tokens 512",
    "mask": "--model_config blind.json",
}


def checked(inputs, change):
    """Return the plan's lines, or the problems."""
    try:
        plan = check.check([*command(inputs, change), "--check"], {})
    except ConfigError as error:
        return error.problems
    return plan.summary().splitlines()


@pytest.mark.parametrize("change", [*GOOD.values(), *REFUSED.values()], ids=[*GOOD, *REFUSED])
def test_a_recalled_check_says_the_same(inputs, change, tmp_path, monkeypatch):
    plain = checked(inputs, change)
    monkeypatch.setenv(remembered.VARIABLE, str(tmp_path))
    first = checked(inputs, change)
    if change in GOOD.values():
        monkeypatch.setattr(models, "load_model_config", None)
        monkeypatch.setattr(checks, "OF_MODEL", None)
    assert plain == first == checked(inputs, change)
    assert (change in REFUSED.values()) or plain[0].startswith("model ")
