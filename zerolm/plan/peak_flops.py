"""Peak FLOP/s of a device, the denominator of MFU: from its datasheet, or measured.

The numerator is computed in `zerolm.model.flops`. torch is imported where it is needed.
"""

import re
import time
from typing import TYPE_CHECKING

from zerolm.distributed.device import EMULATED_RATIO, bf16_ratio, cpu_name

if TYPE_CHECKING:
    import torch

# Shapes (rows, inner, columns) of the matrix products timed on a CPU: one of square matrices, and
# products like those of a micro-batch in small layers. The fastest counts.
CPU_SHAPES = ((768, 768, 768), (2048, 256, 1024), (256, 2048, 1024))
GPU_WIDTH, SMALL_GPU_WIDTH, SMALL_GPU_BYTES = 8192, 4096, 4 << 30  # square products
ROUNDS, PRODUCTS = 3, 5  # on a GPU: number of products per round, which ends in one synchronization

# Dense matrix TFLOP/s with 32-bit accumulation, without sparsity, from the vendors' datasheets:
# (device name, bf16, fp16, fp32 without TF32). The first match counts. MIG slices and laptop GPUs
# reach only a fraction of these and are excluded.
PEAK_TFLOPS: tuple[tuple[str, float | None, float | None, float | None], ...] = (
    # NVIDIA Blackwell Ultra and Blackwell datasheets (GB300 and GB200 NVL72, HGX B300 and B200),
    # halved from "with sparsity"
    (r"\bGB300\b", 2500, 2500, 80),
    (r"\bB300\b", 2250, 2250, 75),
    (r"\bGB200\b", 2500, 2500, 80),
    (r"\bB200\b", 2250, 2250, 75),
    # NVIDIA H100, H200 and GH200 datasheets, halved from "with sparsity"
    (r"\bH20\b", 148, 148, 44),  # its own datasheet, without sparsity
    (r"\bH200 NVL\b", 835.5, 835.5, 60),
    (r"\bG?H200\b", 989.4, 989.4, 67),
    (r"\bH100 NVL\b", 835.5, 835.5, 60),
    (r"\bH100 PCIe\b", 756, 756, 51),
    (r"\bH100\b|\bH800\b", 989.4, 989.4, 67),
    # NVIDIA A100, A30, A10, A40 datasheets; A10G: AWS's and NVIDIA's product brief
    (r"\bA100\b|\bA800\b", 312, 312, 19.5),
    (r"\bA30\b", 165, 165, 10.3),
    (r"\bA40\b", 149.7, 149.7, 37.4),
    (r"\bA10G\b", 70, 70, 35),
    (r"\bA10\b", 125, 125, 31.2),
    # NVIDIA L40S, L40 and L4 datasheets, L4 halved from "with sparsity"
    (r"\bL40S\b", 362, 362, 91.6),
    (r"\bL40\b", 181, 181, 90.5),
    (r"\bL4\b", 121, 121, 30.3),
    # NVIDIA RTX 6000 Ada and RTX PRO 6000 Blackwell datasheets, halved from "with sparsity"
    (r"\bRTX 6000 Ada\b", 364.2, 364.2, 91.1),
    (r"\bRTX PRO 6000 Blackwell Workstation\b", 503.8, 503.8, 125),
    (r"\bRTX PRO 6000 Blackwell Server\b", 480, 480, 120),
    # NVIDIA V100 and T4 datasheets: their tensor cores support only fp16
    (r"\bV100-PCIE\b", None, 112, 14),
    (r"\bV100\b", None, 125, 15.7),
    (r"\bT4\b", None, 65, 8.1),
    # NVIDIA Blackwell, Ada and Ampere GA102 architecture whitepapers, fp32 accumulation
    (r"\bRTX 5090\b(?! D)", 209.5, 209.5, 104.8),
    (r"\bRTX 4090\b(?! D)", 165.2, 165.2, 82.6),
    (r"\bRTX 4080\b(?! SUPER)", 97.5, 97.5, 48.7),
    (r"\bRTX 3090\b(?! Ti)", 71, 71, 35.6),
    (r"\bRTX A6000\b", 154.8, 154.8, 38.7),
    # AMD Instinct datasheets; one device is one of MI250X's two dies
    (r"\bMI355X\b", 2516.6, 2516.6, 157.3),
    (r"\bMI350X\b", 2306.9, 2306.9, 144.2),
    (r"\bMI300A\b", 980.6, 980.6, 122.6),
    (r"\bMI300X\b|\bMI325X\b", 1307.4, 1307.4, 163.4),
    (r"\bMI250X\b", 191.5, 191.5, 47.9),
)
TF32 = "tf32"  # half the bf16 peak, if supported (NVIDIA Ampere and later, AMD MI300 only)
PRECISIONS = {"bfloat16": 0, "bf16": 0, "float16": 1, "fp16": 1, "float32": 2, "fp32": 2}


def datasheet_flops(device_name: str, dtype_name: str) -> float | None:
    """Return a device's dense peak FLOP/s from its datasheet, or None if the device is unknown.

    Args:
        device_name: the result of `torch.cuda.get_device_name()`.
        dtype_name: "bfloat16" or "bf16", "float16" or "fp16", "float32" or "fp32", or "tf32".
    """
    if re.search(r"\bMIG\b|Laptop|Max-Q", device_name):
        return None
    for pattern, *teraflops in PEAK_TFLOPS:
        if re.search(pattern, device_name):
            if dtype_name == TF32:
                half = teraflops[0] and teraflops[0] / 2 * 1e12
                return None if re.search("MI250X|MI35", pattern) else half
            peak = teraflops[PRECISIONS[dtype_name]]
            return None if peak is None else peak * 1e12
    return None


def device_peak_flops(device: "torch.device", precision: str) -> tuple[float, str]:
    """Return the peak FLOP/s of one device, and the source of the figure.

    For a known device the peak comes from its datasheet. For other devices, matrix products are
    timed, and the best rate serves as the peak; timing takes a tenth of a second to a few seconds.

    Args:
        precision: "bf16", "fp16", "fp32" or "tf32". TF32 must be enabled in torch for "tf32".
    """
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    if device.type == "cpu":
        products = " and ".join(dict.fromkeys((precision, "fp32")))
        return _cpu_peak(dtype), f"measured here: {cpu_name()}, matrix products in {products}"
    name = torch.cuda.get_device_name(device)
    if (known := datasheet_flops(name, precision)) is not None:
        return known, f"datasheet of {name}, {precision}"
    return _gpu_peak(device, dtype), f"measured here: {name}, {precision} matrix product"


def _cpu_peak(dtype: "torch.dtype") -> float:
    """Return the highest FLOP/s over all shapes, in `dtype` or in float32, whichever is faster."""
    import torch

    dtypes = {torch.float32, dtype}
    if dtype == torch.bfloat16 and bf16_ratio("cpu") > EMULATED_RATIO:
        dtypes.remove(dtype)  # a single product could take seconds
    best = 0.0
    for each in dtypes:
        for rows, inner, columns in CPU_SHAPES:
            left = torch.ones(rows, inner, dtype=each)
            right = torch.ones(inner, columns, dtype=each)
            for _ in range(1 + ROUNDS):  # the first one warms up
                start = time.perf_counter()
                left @ right
                seconds = time.perf_counter() - start
                best = max(best, 2 * rows * inner * columns / seconds)
    return best


def _gpu_peak(device: "torch.device", dtype: "torch.dtype") -> float:
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    width = GPU_WIDTH if free > SMALL_GPU_BYTES else SMALL_GPU_WIDTH
    operand = torch.ones(width, width, device=device, dtype=dtype)
    product, best = torch.empty_like(operand), float("inf")
    for _ in range(1 + ROUNDS):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(PRODUCTS):
            torch.mm(operand, operand, out=product)
        torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return PRODUCTS * 2 * width**3 / best
