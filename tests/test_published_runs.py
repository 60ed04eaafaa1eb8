"""`benchmarks.published_runs` writes its page of results, and the stated errors are right."""

from statistics import median

import pytest

from benchmarks.published_runs import document, fit
from benchmarks.published_runs import rows as benchmark_rows
from launch.estimate import estimate, step_time
from tests.launching import ROOT
from zerolm.plan import hardware
from zerolm.plan.peak_flops import datasheet_flops

SOAK = pytest.mark.soak  # 20 seconds for the predictions of all runs; always: the golden plans


@pytest.fixture(scope="module")
def runs() -> dict[str, document.Row]:
    return {row.name: row for row in document.runs()}


@pytest.fixture(scope="module")
def benchmarks() -> tuple:
    """Published rows, and the values that are fitted to them."""
    return benchmark_rows.read()


@SOAK
def test_the_page_of_results_is_what_the_command_prints(runs, benchmarks, monkeypatch):
    monkeypatch.setattr(document, "runs", lambda: list(runs.values()))
    monkeypatch.setattr(benchmark_rows, "read", lambda: benchmarks)
    text = (ROOT / "benchmarks" / "results" / "published_runs.md").read_text(encoding="utf-8")
    assert text == document.document() + "\n"


@SOAK
def test_predicted_flops_match_the_reported_ones(runs):
    assert runs["Llama 2 7B"].flops == pytest.approx(8.4e22, rel=0.05)
    assert runs["Llama 3.1 405B"].flops == pytest.approx(3.8e25, rel=0.01)
    for row in runs.values():
        assert row.flops_error is None or abs(row.flops_error) < 0.05
        assert row.flops < row.all_flops < 1.25 * row.flops


@SOAK
def test_parameters_are_the_published_ones(runs):
    """Model cards and papers: 6.74B, 13.0B, 69.0B, 8.03B, 70.6B, 405B, 176.2B."""
    found = {row.name: row.parameters for row in runs.values()}
    assert found["Llama 2 7B"] == 6_738_415_616
    assert found["Llama 3 8B"] == 8_030_261_248
    assert found["Llama 3.1 405B"] == 405_853_388_800
    assert found["BLOOM 176B"] == 176_247_271_424


@SOAK
def test_the_stated_errors_of_the_step_time_are_right(runs, benchmarks):
    rows, values = benchmarks
    dense = [row for row in rows if row.is_counted and not row.run.routed_flops]
    errors = [abs(row.error) for row in dense]
    assert median(errors) == pytest.approx(step_time.MEDIAN_ERROR, abs=0.001) and len(dense) > 200
    assert max(errors) == pytest.approx(step_time.MAX_ERROR, abs=0.005)
    large = [abs(row.error) for row in dense if row.is_large]
    assert median(large) == pytest.approx(step_time.MEDIAN_MANY, abs=0.001) and len(large) > 15
    assert max(large) == pytest.approx(step_time.MAX_MANY, abs=0.001)
    plain = [row.run for row in dense if row.run.layout.tensor == 1]
    for stage, devices in step_time.LARGEST_BENCHMARKS.items():
        assert devices == max(run.devices for run in plain if run.profile.zero_stage == stage)
    ratios = sorted(row.ratio for row in runs.values() if row.ratio)
    quarter = len(ratios) // 4
    middle = (round(ratios[quarter], 1), round(ratios[-1 - quarter], 1))
    assert middle == step_time.PUBLISHED_RUNS
    devices = hardware.devices_of(hardware.FILE)
    for group, names in {
        "A100, 2023": ("A100-40GB", "A100-80GB"),
        "Hopper, 2025": ("H100", "H200", "H100-PCIe"),
        "Blackwell, 2025": ("B200",),
    }.items():
        for name in names:
            assert devices[name].attained == pytest.approx(values["attained"][group], abs=0.006)


@SOAK
def test_a_row_left_out_is_predicted_like_a_fitted_one(benchmarks):
    """No row decides on a number by itself: without it the prediction is nearly the same."""
    rows, values = benchmarks
    fitted = [row for row in rows if row.is_fitted]
    moved = [abs(row.held_out / row.predict(values["attained"]) - 1) for row in fitted]
    assert median(moved) < 0.01 and {row.entry["source"] for row in rows} == set(values["sources"])


@SOAK
def test_the_throughput_lost_on_many_devices_is_predicted_without_a_fit(benchmarks):
    """From 64 to 1,024 devices InternEvo's ZeRO-1 loses 38%, and with tensor parallelism 19%."""
    rows, _ = benchmarks
    for source, lost in (("InternEvo", 0.38), ("InternEvo, 2 tensor parallel", 0.19)):
        found = {row.run.devices: row for row in rows if row.entry["source"] == source}
        assert all(abs(found[devices].error) < 0.15 for devices in (512, 1024))
        reported, planned = (
            1 - getattr(found[1024], name) / getattr(found[64], name)
            for name in ("reported", "held_out")
        )
        assert reported == pytest.approx(lost, abs=0.01)
        assert planned == pytest.approx(lost, abs=0.08)


def test_reported_memory_is_the_stated_multiple_of_the_live_tensors():
    ratios = benchmark_rows.memory_ratios()
    assert median(ratios) == pytest.approx(estimate.RESERVED_RATIO, abs=0.005)
    assert (min(ratios), max(ratios)) == pytest.approx(estimate.RESERVED_RATIOS, abs=0.005)


@SOAK
def test_the_fitted_numbers_are_those_of_the_fit(benchmarks):
    rows, values = benchmarks
    rows = [row for row in rows if row.is_fitted]
    groups = list(values["attained"])
    shares, costs = fit.split(fit.fit(rows, groups), groups)
    assert shares == pytest.approx(values["attained"], abs=0.01)
    for name in fit.NAMES:
        fitted = getattr(costs, name)
        assert getattr(step_time.COSTS, name) == pytest.approx(fitted, rel=0.02), name


def test_peaks_equal_those_that_a_run_computes_its_mfu_with():
    names = {
        "A100-80GB": "NVIDIA A100-SXM4-80GB", "H100": "NVIDIA H100 80GB HBM3",
        "H100-PCIe": "NVIDIA H100 PCIe", "H100-NVL": "NVIDIA H100 NVL",
        "H200-NVL": "NVIDIA H200 NVL", "GH200": "NVIDIA GH200 480GB", "H200": "NVIDIA H200",
        "B200": "NVIDIA B200", "A10G": "NVIDIA A10G", "L4": "NVIDIA L4",
        "MI300X": "AMD Instinct MI300X", "V100": "Tesla V100-SXM2-32GB",
    }  # fmt: skip
    devices = hardware.devices_of(hardware.FILE)
    for key, name in names.items():
        assert hardware.recognize(name) == devices[key]
        for precision in ("bf16", "fp16", "fp32"):
            assert datasheet_flops(name, precision) == devices[key].peak(precision)
