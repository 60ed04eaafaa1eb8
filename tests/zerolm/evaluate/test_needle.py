"""Needles: where they are, and that a model that looks them up finds all, any other none."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.launching import write_shards
from zerolm.evaluate.held_out import HeldOut
from zerolm.evaluate.needle import DEPTHS, NUM_IDS, Needle, rows
from zerolm.evaluate.runner import ModelRunner
from zerolm.parts.settings import RunSettings
from zerolm.shards.reader import open_source

SEQ_LEN, ITEMS, VOCABULARY, EOS = 96, 5, 512, 0


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return open_source(write_shards(tmp_path_factory.mktemp("text") / "shards", 40))


def lookup(input_ids, **_):
    """Predict for each token what followed the last earlier occurrence of the NUM_IDS before it."""
    logits = torch.zeros(*input_ids.shape, VOCABULARY)
    for row, ids in enumerate(input_ids.tolist()):
        followed: dict[tuple, int] = {}
        for at in range(NUM_IDS, len(ids)):
            followed[tuple(ids[at - NUM_IDS : at])] = ids[at]
            if (last := tuple(ids[at - NUM_IDS + 1 : at + 1])) in followed:
                logits[row, at, followed[last]] = 50.0
    return SimpleNamespace(logits=logits)


def nothing(input_ids, **_):
    return SimpleNamespace(logits=torch.zeros(*input_ids.shape, VOCABULARY))


def measured(model, source):
    options = {"seq_len": SEQ_LEN, "micro_batch_size": 2, "shard": 0, "num_shards": 1}
    held_out = HeldOut([source], ["text"], ITEMS, options, None)
    suite = Needle(RunSettings(needle_items=ITEMS), held_out)
    return suite.measure(ModelRunner(model, "cpu", None, SEQ_LEN, 200)).figures


def test_a_needle_is_in_the_text_at_its_depth_and_its_key_at_the_end(source) -> None:
    tokens = np.fromfile(source.directory / "shard-00000.bin", np.uint16).tolist()
    windows = [tokens[n * SEQ_LEN : (n + 1) * SEQ_LEN] for n in range(ITEMS)]
    items = rows(windows, {EOS})
    assert items == rows(windows, {EOS}) and len(items) == ITEMS * len(DEPTHS)
    for number, item in enumerate(items):
        window, depth = windows[number // len(DEPTHS)], DEPTHS[number % len(DEPTHS)]
        key, value = item.ids[-2 * NUM_IDS : -NUM_IDS], item.ids[-NUM_IDS:]
        at = (SEQ_LEN - 4 * NUM_IDS) * depth // 100
        needle = [*key, *value]
        assert item.ids == [*window[:at], *needle, *window[at : SEQ_LEN - 4 * NUM_IDS], *needle]
        assert EOS not in needle and set(needle) <= set(tokens)
        assert item.num_scored == NUM_IDS and len(item.ids) == SEQ_LEN
    assert len({tuple(item.ids[-NUM_IDS:]) for item in items}) == ITEMS


def test_a_model_that_looks_keys_up_finds_all_and_any_other_none(source) -> None:
    found = measured(lookup, source)
    assert [found[f"needle/acc_at_{depth}"] for depth in DEPTHS] == [1.0] * len(DEPTHS)
    assert found["needle/acc"] == 1 and found["needle/loss"] < 1e-6
    found = measured(nothing, source)
    assert found["needle/acc"] == 0
    losses = [found[f"needle/loss{at}"] for at in ("", *(f"_at_{d}" for d in DEPTHS))]
    assert losses == pytest.approx([np.log(VOCABULARY)] * 4)
