"""Use published scaling laws to choose a model size and token count for a compute budget."""

from dataclasses import dataclass

from zerolm.common.errors import ConfigError
from zerolm.common.values import count, parse_duration, parse_real, within
from zerolm.plan.hardware import Hardware


@dataclass(frozen=True)
class LossFit:
    """Loss = entropy + model / N^alpha + data / D^beta, in nats per token on the authors' data.

    Only differences between losses transfer to other data.
    """

    name: str
    entropy: float
    model: float
    data: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        return self.entropy + self.model / parameters**self.alpha + self.data / tokens**self.beta

    def optimum(self, flops: float) -> tuple[float, float]:
        """Return the parameters and tokens that minimize the loss for a budget.

        Assumes 6 FLOPs per parameter and token.

        Source: Hoffmann et al. 2022 (arXiv 2203.15556), equation 4.
        """
        both = self.alpha + self.beta
        ratio = (self.alpha * self.model / (self.beta * self.data)) ** (1 / both)
        parameters = ratio * (flops / 6) ** (self.beta / both)
        return parameters, flops / 6 / parameters


HOFFMANN = LossFit("Hoffmann et al. 2022, approach 3", 1.69, 406.4, 410.7, 0.34, 0.28)
# Besiroglu et al. 2024 (arXiv 2404.10102), "Chinchilla Scaling: A replication attempt"
BESIROGLU = LossFit("Besiroglu et al. 2024", 1.8172, 482.01, 2085.43, 0.3478, 0.3658)
RULE = "20 tokens per parameter"
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, approaches 1 and 2
OVERTRAINED = (2, 4, 8, 16)  # factors by which to shrink the model, for cheaper inference


@dataclass(frozen=True)
class Choice:
    """A model size and a token count for one budget. Fields are JSON keys.

    Attributes:
        loss: loss predicted by the fit of Besiroglu et al.
        penalty: difference from the loss at the optimal size.
        wasted: share of the budget that the optimal size would save at the same loss.
    """

    name: str
    parameters: float
    tokens: float
    loss: float
    penalty: float
    wasted: float


def flops_of(
    text: str, hardware: Hardware, devices: int, mfu: float | None = None
) -> tuple[float, str]:
    """Return a budget in FLOPs, and text that describes how they were derived.

    Args:
        text: FLOPs (`1e22`), money (`$50000`), or time on all devices (`14d`, `36h`).
        mfu: model FLOP/s utilization; None uses the device's `attained`.
    """
    if text.startswith("$") and hardware.price_per_hour is None:
        raise ConfigError(
            f"command line: --budget: {text}, but the price of {hardware.name} is unknown. Give "
            f"--price_per_hour."
        )
    try:
        if text.startswith("$"):
            dollars = parse_real(text[1:].replace(",", ""))
            hours = dollars / (hardware.price_per_hour or 1.0)
        elif text[-1:] in ("d", "h"):
            hours = parse_duration(text) / 3600 * devices
        else:
            return within(parse_real(text), above=0), ""
        within(hours, above=0)
    except ValueError:
        raise ConfigError(
            f"command line: --budget: {text} is not a budget. Write it like 1e22, $50000 or 14d."
        ) from None
    peak = hardware.bf16 or hardware.fp16
    if hardware.device.lacks_bf16 and hardware.is_cpu:
        peak = hardware.fp32
    assert peak is not None
    share = mfu or hardware.attained
    derivation = f"{hours:,.0f} device-hours of {hardware.name} at {share:.0%} of its peak, "
    return hours * 3600 * peak * share, derivation


def choices(flops: float) -> list[Choice]:
    """Return model sizes and token counts for a budget.

    They follow the rule of thumb, both fits, and several degrees of overtraining.
    """
    parameters, tokens = BESIROGLU.optimum(flops)
    rule = (flops / 6 / TOKENS_PER_PARAMETER) ** 0.5
    sizes = [
        (RULE, rule),
        (HOFFMANN.name, HOFFMANN.optimum(flops)[0]),
        (BESIROGLU.name, parameters),
        *((f"overtrained: {times} x smaller", parameters / times) for times in OVERTRAINED),
    ]
    best = BESIROGLU.loss(parameters, tokens)
    found = []
    for name, size in sizes:
        loss = BESIROGLU.loss(size, flops / 6 / size)
        wasted = 1 - flops_for(loss) / flops
        found.append(Choice(name, size, flops / 6 / size, loss, loss - best, max(0.0, wasted)))
    return found


def flops_for(loss: float) -> float:
    """Return the minimum FLOPs to reach a loss, found by bisection on Besiroglu et al.'s fit."""
    low, high = 1.0, 40.0
    for _ in range(200):
        middle = (low + high) / 2
        reached = BESIROGLU.loss(*BESIROGLU.optimum(10**middle)) <= loss
        low, high = (low, middle) if reached else (middle, high)
    return 10**high


def as_text(flops: float, found: list[Choice]) -> str:
    """Return the table for the console."""
    lines = [f"{flops:.3g} FLOPs", ""]
    head = f"{'choice':<34}{'parameters':>12}{'tokens':>10}{'tokens/parameter':>18}"
    lines.append(head + f"{'loss':>8}{'penalty':>9}{'wasted':>8}")
    for one in found:
        lines.append(
            f"{one.name:<34}{count(one.parameters):>12}{count(one.tokens):>10}"
            f"{one.tokens / one.parameters:>18,.0f}{one.loss:>8.3f}{one.penalty:>+9.4f}"
            f"{one.wasted:>8.1%}"
        )
    lines += [
        "",
        f"Losses follow the fit of {BESIROGLU.name} (arXiv 2404.10102), in nats on the authors' "
        f"data: compare",
        "them, but expect other values on yours. Counted at 6 FLOPs per parameter and token, "
        "without attention.",
        "`wasted` is the share of the budget that the optimal size would save at the same loss; a "
        "smaller model",
        "is cheaper to use in return.",
    ]
    return "\n".join(lines)
