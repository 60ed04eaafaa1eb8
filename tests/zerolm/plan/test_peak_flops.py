"""Peaks of devices: those of their datasheets, or measured where there is none."""

import time

import pytest
import torch

from zerolm.distributed.device import bf16_ratio
from zerolm.plan.peak_flops import datasheet_flops, device_peak_flops
from zerolm.train.throughput import Stopwatch

# bf16, fp16 and fp32, from the vendors' datasheets.
DATASHEETS = {
    "NVIDIA GB300": (2500, 2500, 80),
    "NVIDIA B300 SXM6 AC": (2250, 2250, 75),
    "NVIDIA H20": (148, 148, 44),
    "NVIDIA H20-3e": (148, 148, 44),
    "NVIDIA RTX 6000 Ada Generation": (364.2, 364.2, 91.1),
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": (503.8, 503.8, 125),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": (480, 480, 120),
    "NVIDIA GeForce RTX 4080": (97.5, 97.5, 48.7),
    "AMD Instinct MI350X": (2306.9, 2306.9, 144.2),
    "AMD Instinct MI300A": (980.6, 980.6, 122.6),
    "NVIDIA GB200": (2500, 2500, 80),
    "NVIDIA B200": (2250, 2250, 75),
    "NVIDIA H200 NVL": (835.5, 835.5, 60),
    "NVIDIA H200": (989.4, 989.4, 67),
    "NVIDIA H100 NVL": (835.5, 835.5, 60),
    "NVIDIA H100 PCIe": (756, 756, 51),
    "NVIDIA H100 80GB HBM3": (989.4, 989.4, 67),
    "NVIDIA A100-SXM4-80GB": (312, 312, 19.5),
    "NVIDIA A30": (165, 165, 10.3),
    "NVIDIA A40": (149.7, 149.7, 37.4),
    "NVIDIA A10G": (70, 70, 35),
    "NVIDIA A10": (125, 125, 31.2),
    "NVIDIA L40S": (362, 362, 91.6),
    "NVIDIA L40": (181, 181, 90.5),
    "NVIDIA L4": (121, 121, 30.3),
    "Tesla V100-PCIE-32GB": (None, 112, 14),
    "Tesla V100-SXM2-16GB": (None, 125, 15.7),
    "Tesla T4": (None, 65, 8.1),
    "NVIDIA GeForce RTX 5090": (209.5, 209.5, 104.8),
    "NVIDIA GeForce RTX 4090": (165.2, 165.2, 82.6),
    "NVIDIA GeForce RTX 3090": (71, 71, 35.6),
    "NVIDIA RTX A6000": (154.8, 154.8, 38.7),
    "AMD Instinct MI355X": (2516.6, 2516.6, 157.3),
    "AMD Instinct MI300X": (1307.4, 1307.4, 163.4),
    "AMD Instinct MI250X": (191.5, 191.5, 47.9),
}


@pytest.mark.parametrize("device", DATASHEETS)
def test_each_device_has_the_peaks_of_its_datasheet(device):
    found = [datasheet_flops(device, name) for name in ("bf16", "fp16", "fp32")]
    wanted = [None if each is None else pytest.approx(each * 1e12) for each in DATASHEETS[device]]
    assert found == wanted


@pytest.mark.parametrize(
    ("device", "dtype", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("NVIDIA A100-SXM4-80GB", "float32", 19.5),
        ("Tesla V100-SXM2-16GB", "float16", 125),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.7),
        ("AMD Instinct MI250X", "tf32", None),
        ("Tesla T4", "tf32", None),
        ("NVIDIA H800", "bf16", 989.4),
        ("NVIDIA A800-SXM4-80GB", "bf16", 312),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("AMD Instinct MI325X", "bf16", 1307.4),
        ("NVIDIA GeForce RTX 4090 D", "bf16", None),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16", None),
        ("NVIDIA GeForce RTX 4080 SUPER", "bf16", None),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "bf16", None),
        ("NVIDIA RTX 6000", "bf16", None),
        ("AMD Instinct MI350X", "tf32", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bf16", None),
        ("AMD EPYC", "bf16", None),
    ],
)
def test_names_of_variants_and_precisions_have_the_right_peak(device, dtype, teraflops):
    peak = datasheet_flops(device, "".join(list(dtype)))  # a string, not only the constant
    assert peak == (None if teraflops is None else pytest.approx(teraflops * 1e12))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_product_is_faster_than_the_measured_peak_of_a_cpu(precision):
    """The peak counts float32 as well, so that emulated bf16 cannot give an MFU above 1."""
    operand = torch.ones(512, 512)
    peaks, rates = [], []
    for _ in range(8):  # in turn: the best of many, of which nothing else took a part
        peak, source = device_peak_flops(torch.device("cpu"), precision)
        assert source.startswith("measured here: ")
        start = time.perf_counter()
        operand @ operand
        peaks.append(peak)
        rates.append(2 * 512**3 / (time.perf_counter() - start))
    assert max(rates) < 1.5 * max(peaks)


def test_a_measured_peak_of_emulated_bf16_is_that_of_float32(monkeypatch):
    monkeypatch.setattr("zerolm.plan.peak_flops.bf16_ratio", lambda device: 57.0)
    measured = []
    monkeypatch.setattr(torch, "ones", lambda *shape, dtype: _seen(measured, shape, dtype))
    device_peak_flops(torch.device("cpu"), "bf16")
    assert set(measured) == {torch.float32}


def _seen(measured, shape, dtype):
    measured.append(dtype)
    return torch.zeros(shape, dtype=dtype)


def test_an_mfu_above_1_is_not_logged():
    watch = Stopwatch(torch.device("cpu"))
    for peak, wanted in ((1e12, True), (1e9, False)):
        with watch.timing_step():
            time.sleep(0.01)
        watch.count(samples=1, tokens=1000)
        row = watch.report(world_size=1, flops_per_token=1e6, peak_flops=peak)
        assert ("throughput/mfu" in row) is wanted and row["throughput/tokens_per_second"] > 0


def test_the_ratio_of_bf16_is_that_of_products():
    """Both precisions are timed here in the same way but with other sizes."""
    operands = [torch.ones(160, 160, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    seconds = [float("inf")] * 2
    for _ in range(40):  # the shortest of many: of some nothing else took a part
        for index, operand in enumerate(operands):
            start = time.perf_counter()
            operand @ operand
            seconds[index] = min(seconds[index], time.perf_counter() - start)
    measured, found = seconds[1] / seconds[0], bf16_ratio("cpu")
    if found == 1.0:  # instructions for bf16; small products still take up to 2.5 times as long
        assert measured < 5, "emulated, it would be 20 to 200"
    else:
        assert (measured > 1.7) is (found > 1.7)
