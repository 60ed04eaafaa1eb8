"""`plan --published`: docs/published_runs.md is its output, and the stated errors are right."""

from statistics import median

import pytest

from benchmarks import fit_plan
from launch.plan import hardware, published, published_benchmarks, step_time
from tests.launching import ROOT
from zerolm.plan.peak_flops import datasheet_flops


@pytest.fixture(scope="module")
def runs() -> dict[str, published.Row]:
    return {row.name: row for row in published.runs()}


@pytest.fixture(scope="module")
def benchmarks() -> tuple:
    """Published rows, and the values that are fitted to them."""
    return published_benchmarks.read()


def test_the_table_in_docs_is_what_the_command_prints(runs, benchmarks, monkeypatch):
    monkeypatch.setattr(published, "runs", lambda: list(runs.values()))
    monkeypatch.setattr(published_benchmarks, "read", lambda: benchmarks)
    text = (ROOT / "docs" / "published_runs.md").read_text(encoding="utf-8")
    assert text == published.document() + "\n"


def test_predicted_flops_match_the_reported_ones(runs):
    assert runs["Llama 2 7B"].flops == pytest.approx(8.4e22, rel=0.05)
    assert runs["Llama 3.1 405B"].flops == pytest.approx(3.8e25, rel=0.01)
    for row in runs.values():
        assert row.flops_error is None or abs(row.flops_error) < 0.05
        assert row.flops < row.all_flops < 1.25 * row.flops


def test_parameters_are_the_published_ones(runs):
    """Model cards and papers: 6.74B, 13.0B, 69.0B, 8.03B, 70.6B, 405B, 176.2B."""
    found = {row.name: row.parameters for row in runs.values()}
    assert found["Llama 2 7B"] == 6_738_415_616
    assert found["Llama 3 8B"] == 8_030_261_248
    assert found["Llama 3.1 405B"] == 405_853_388_800
    assert found["BLOOM 176B"] == 176_247_271_424


def test_the_stated_errors_of_the_step_time_are_right(runs, benchmarks):
    rows, values = benchmarks
    dense = [row for row in rows if not row.run.routed_flops]
    errors = [abs(row.held_out / row.reported - 1) for row in dense]
    assert median(errors) == pytest.approx(step_time.MEDIAN_ERROR, abs=0.001) and len(dense) > 200
    assert max(errors) == pytest.approx(step_time.MAX_ERROR, abs=0.005)
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


def test_a_row_left_out_is_predicted_like_a_fitted_one(benchmarks):
    """No row decides on a number by itself: without it the prediction is nearly the same."""
    rows, values = benchmarks
    moved = [abs(row.held_out / row.predict(values["attained"]) - 1) for row in rows]
    assert median(moved) < 0.01 and {row.entry["source"] for row in rows} == set(values["sources"])


@pytest.mark.soak
def test_the_fitted_numbers_are_those_of_the_fit(benchmarks):
    rows, values = benchmarks
    groups = list(values["attained"])
    shares, costs = fit_plan.split(fit_plan.fit(rows, groups), groups)
    assert shares == pytest.approx(values["attained"], abs=0.01)
    for name in fit_plan.NAMES:
        fitted = getattr(costs, name)
        assert getattr(step_time.COSTS, name) == pytest.approx(fitted, rel=0.02), name


def test_peaks_equal_those_that_a_run_computes_its_mfu_with():
    names = {
        "A100-80GB": "NVIDIA A100-SXM4-80GB",
        "H100": "NVIDIA H100 80GB HBM3",
        "H100-PCIe": "NVIDIA H100 PCIe",
        "H100-NVL": "NVIDIA H100 NVL",
        "H200-NVL": "NVIDIA H200 NVL",
        "GH200": "NVIDIA GH200 480GB",
        "H200": "NVIDIA H200",
        "B200": "NVIDIA B200",
        "A10G": "NVIDIA A10G",
        "L4": "NVIDIA L4",
        "MI300X": "AMD Instinct MI300X",
        "V100": "Tesla V100-SXM2-32GB",
    }
    devices = hardware.devices_of(hardware.FILE)
    for key, name in names.items():
        assert hardware.recognize(name) == devices[key]
        for precision in ("bf16", "fp16", "fp32"):
            assert datasheet_flops(name, precision) == devices[key].peak(precision)
