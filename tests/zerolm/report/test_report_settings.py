"""Settings in the report: all of them, without secrets."""

import json

from zerolm.common.secrets import HIDDEN
from zerolm.report.settings import differences, flatten

SECRET = "d41d8cd98f00b204e9800998ecf8427e"


def test_no_secret_is_shown() -> None:
    record = {
        "settings": {"upload_to": f"s3://someone:{SECRET}@bucket/first", "batch_tokens": 8192},
        "ds_config": {
            "comet": {"enabled": True, "api_key": SECRET, "project": "mine"},
            "monitor": {"wandb": {"password": SECRET, "token": SECRET}},
            "other": f"hf_{SECRET}",
        },
        "model_config": {"eos_token_id": 2, "hidden_size": 64, "num_key_value_heads": 2},
    }
    found = flatten(record)
    assert SECRET not in json.dumps(found)
    assert found["ds_config.comet.api_key"] == found["ds_config.monitor.wandb.token"] == HIDDEN
    assert found["settings.upload_to"] == f"s3://{HIDDEN}@bucket/first"
    assert found["model_config.eos_token_id"] == "2" and found["settings.batch_tokens"] == "8192"


def test_settings_that_differ_are_listed_with_all_values() -> None:
    runs = [
        {"zero_stage": 2, "settings": {"seed": 0}},
        {"zero_stage": 3, "settings": {"seed": 0, "x": 1}},
    ]
    assert differences([flatten(run) for run in runs]) == [
        {"key": "zero_stage", "values": ["2", "3"]},
        {"key": "settings.x", "values": [None, "1"]},
    ]
