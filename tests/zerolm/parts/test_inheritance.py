"""Which settings of a run.json a new run, a branch and a resume take over."""

import json
import math
from dataclasses import replace

import pytest

from tests.launching import write_json
from tests.test_tables import inherited
from tests.zerolm.preflight.preflight_inputs import command, write_record
from tests.zerolm.preflight.test_branch import STEP_TOKENS, begin, make_run, plan_of, refused
from zerolm.common.errors import ConfigError
from zerolm.parts.parse import parse_settings
from zerolm.parts.settings import FLAGS, STATIC_DEFAULTS
from zerolm.preflight import check, run_record
from zerolm.train import run_directory

TOTAL, WARMUP = 51200, 512  # of `command`, and 1% of it
PEAK = 1e-3


def cosine(step: int, peak: float, low: float, total: int = TOTAL) -> float:
    """The rate of a step of 512 tokens, written out without the code of schedules."""
    tokens = step * STEP_TOKENS
    if tokens < WARMUP:
        return peak * tokens / WARMUP
    done = (tokens - WARMUP) / (total - WARMUP)
    return low + (peak - low) * (1 + math.cos(math.pi * done)) / 2


CHANGES = {
    "a decay after a constant rate": ("--schedule constant", "--schedule cosine", PEAK, PEAK / 10),
    "a lower peak": ("--schedule cosine", "--learning_rate 1e-4", 1e-4, 1e-5),
    "a lower constant": ("--schedule constant", "--learning_rate 1e-4", 1e-4, None),
    "a chosen minimum": ("--schedule cosine --min_learning_rate 2e-5", "--learning_rate 5e-4",
                         5e-4, 2e-5),
    "a chosen minimum that a constant rate does not use":
        ("--schedule constant --min_learning_rate 0", "--schedule cosine", PEAK, 0.0),
    "a decay over other tokens": ("--schedule wsd", "--schedule cosine", PEAK, PEAK / 10),
    "a value taken back": ("--schedule cosine --min_learning_rate 2e-5", "--no-min_learning_rate",
                           PEAK, PEAK / 10),
}  # fmt: skip


@pytest.mark.parametrize("early", [False, True], ids=["", "record of an earlier release"])
@pytest.mark.parametrize(("trunk", "change", "peak", "low"), CHANGES.values(), ids=list(CHANGES))
@pytest.mark.parametrize("route", ["settings", "branch"])
def test_rates_are_those_of_a_plain_loop(inputs, tmp_path, route, trunk, change, peak, low, early):
    plan = make_run(inputs, tmp_path / "trunk", f"{trunk} --learning_rate {PEAK}", steps=[20])
    if early:
        record = json.loads((tmp_path / "trunk/run.json").read_text())
        del record["derived_settings"]
        if plan.settings.min_learning_rate is None:  # what a constant run recorded
            record["settings"]["min_learning_rate"] = PEAK
        write_json(tmp_path / "trunk/run.json", record)
    if route == "branch":
        again = plan_of(tmp_path / "trunk", change)
    else:
        words = ["--settings", f"{tmp_path}/trunk/run.json", "--run_dir", f"{tmp_path}/new"]
        again = check.check([*words, *change.split()], {})
    expected = [peak if low is None else cosine(step, peak, low) for step in range(1, 101)]
    rates = [again.learning_rate(step * STEP_TOKENS) for step in range(1, 101)]
    assert rates == pytest.approx(expected, rel=1e-12)


def test_a_chosen_minimum_survives_a_constant_branch(inputs, tmp_path):
    flags = f"--schedule cosine --learning_rate {PEAK} --min_learning_rate 0"
    make_run(inputs, tmp_path / "trunk", flags, steps=[20])
    begin(tmp_path / "trunk", "--schedule constant", run="flat")
    again = plan_of(tmp_path / "trunk", f"--branch {tmp_path}/flat", "--schedule cosine")
    assert again.learning_rate(TOTAL) == 0.0


def test_an_optimizer_gets_its_own_betas_and_a_longer_run_its_own_warm_up(inputs, tmp_path):
    write_record(tmp_path, check.check(command(inputs, f"--run_dir {tmp_path}"), {}))
    words = ["--settings", f"{tmp_path}/run.json", "--run_dir", f"{tmp_path}/new"]
    lion = check.check([*words, "--deepspeed_config", f"{inputs}/lion.json"], {})
    assert (lion.settings.beta1, lion.settings.beta2) == (0.9, 0.99)
    longer = check.check([*words, "--total_tokens", "1024000"], {})
    assert longer.settings.warmup_tokens == 10240
    chosen = check.check([*words, "--beta2", "0.98"], {})
    write_record(tmp_path, chosen)
    again = check.check([*words, "--deepspeed_config", f"{inputs}/lion.json"], {})
    assert again.settings.beta2 == 0.98
    record = json.loads((tmp_path / "run.json").read_text())
    record["settings"]["warmup_tokens"] = 2048
    write_json(tmp_path / "run.json", record)
    assert check.check(words, {}).settings.warmup_tokens == 2048, "a value that was edited"
    del record["derived_settings"]  # as an earlier release wrote it
    write_json(tmp_path / "run.json", record)
    again = check.check([*words, "--deepspeed_config", f"{inputs}/lion.json"], {}).settings
    assert (again.beta1, again.beta2, again.warmup_tokens) == (0.9, 0.98, 2048)


def test_a_temperature_of_the_trunk_can_be_taken_back(inputs, tmp_path):
    data = f"--data {inputs}/web --data {inputs}/val"
    make_run(inputs, tmp_path / "trunk", "--data web --data val --mixture_temperature 4")
    for run, flags in (("one", "--mixture_temperature 1"), ("none", "--no-mixture_temperature")):
        plan = begin(tmp_path / "trunk", flags, run=run)
        begins = plan.mixture.blends[1].start
        assert begins >= 20 * 16
        sources = plan.order()(range(begins, begins + 21 * 64)).source.tolist()
        assert (sources.count(0), sources.count(1)) == (20 * 64, 64), "as their sizes"
        again = plan_of(tmp_path / "trunk", flags, run=run)
        assert again.mixture == plan.mixture and not again.changed
        with pytest.raises(ConfigError, match="--no-mixture_temperature"):
            plan_of(tmp_path / "trunk", "--mixture_temperature 3", run=run)
    weighted = plan_of(tmp_path / "trunk", data.replace("/web", "/web=1").replace("/val", "/val=1"))
    assert weighted.mixture.blends[1].weights == (1.0, 1.0)
    assert refused(tmp_path / "trunk", "--data_stage 9k:web=1", "--seq_len 7")


# ---- The table of docs/operate.md


def sample(name: str) -> object:
    """Return a value of a setting that is not its default."""
    about, default = FLAGS[name], STATIC_DEFAULTS[name]
    if about["choices"]:
        return next(each for each in about["choices"] if each != default)
    kinds = {"list": ["x"], "text": "x", "switch": not default, "recompute": "selective"}
    return kinds.get(about["kind"], 0.25 if about["kind"] == "real" else 77)


@pytest.mark.parametrize("route", ["settings", "branch", "resume"])
def test_settings_are_taken_over_as_the_table_says(tmp_path, route):
    (run := tmp_path / "run").mkdir()
    values = {name: sample(name) for name, about in FLAGS.items() if about["saved"]}
    values |= {"run_dir": str(run), "branch": None}
    for is_chosen in (True, False):
        record = {"settings": values, "derived_settings": {} if is_chosen else values}
        write_json(run / "run.json", record)
        words = ["--run_dir", str(run if route == "resume" else tmp_path / "new")]
        words += ["--branch" if route == "branch" else "--settings"]
        words += [str(run) if route == "branch" else f"{run}/run.json"]
        settings, problems = parse_settings(words)
        assert not problems
        for name in values.keys() - {"run_dir", "branch"}:
            outcome = inherited(name, route, is_chosen)
            expected = values[name] if outcome == "kept" else STATIC_DEFAULTS[name]
            found = settings.to_json()[name]
            assert found == expected, (name, route, is_chosen, outcome)
            assert (name in settings.explicit) == (is_chosen and outcome == "kept"), name
        back, problems = parse_settings([*words, *(f"--no-{name}" for name in values)])
        assert not problems
        for name, value in back.to_json().items():
            off = False if isinstance(STATIC_DEFAULTS[name], bool) else STATIC_DEFAULTS[name]
            assert value == off, f"--no-{name}"


def test_other_values_at_a_resume_are_refused_as_the_table_says(inputs, tmp_path):
    plan = check.check(command(inputs, f"--run_dir {tmp_path}"), {})
    record = run_directory.record(plan)
    for name in run_record.CURVE_SETTINGS:
        value = "constant" if name == "schedule" else sample(name)
        other = replace(plan, settings=replace(plan.settings, **{name: value}))
        found = [one for one in run_record.differences(record, other, 0) if name in one.key]
        always = " always" if found and found[0].obstacle else ""
        assert f"{'refused' if found else 'free'}{always}" == inherited(name, "other"), name
