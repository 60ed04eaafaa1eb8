"""What to train for a budget: model size and tokens, by published fits, and what a choice costs."""

from dataclasses import dataclass

from launch.plan.hardware import Hardware
from zerolm.common.errors import ConfigError
from zerolm.common.values import parse_number
from zerolm.config.flags import CONVERTERS


@dataclass(frozen=True)
class LossFit:
    """Loss = entropy + model / N^alpha + data / D^beta, in nats per token of their data.

    Only differences between losses carry over to other data.
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
        """Return the parameters and tokens of least loss, with 6 operations a parameter and token.

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
OVERTRAINED = (2, 4, 8, 16)  # how many times smaller than the optimum, to be cheap to use


@dataclass(frozen=True)
class Choice:
    """A size and its tokens for one budget.

    Attributes:
        loss: by Besiroglu et al.'s fit.
        penalty: more loss than the best for the budget has.
        wasted: share of the budget that the best would not need for the same loss.
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
    """Turn a budget into operations, and say how.

    Args:
        text: operations (`1e22`), money (`$50000`), or time of all devices (`14d`, `36h`).
        mfu: share of the peak; None takes what the device attains.

    Raises:
        ConfigError: it is none of these, or the price of the device is not known.
    """
    if text.startswith("$") and hardware.price_per_hour is None:
        raise ConfigError(
            f"command line: --budget: {text}, but the price of {hardware.name} is not known. Give "
            f"--price_per_hour."
        )
    try:
        if text.startswith("$"):
            dollars = parse_number(text[1:].replace(",", ""))
            hours = dollars / (hardware.price_per_hour or 1.0)
        elif text[-1:] in ("d", "h"):
            hours = CONVERTERS["duration"](text) / 3600 * devices
        else:
            return _positive(float(parse_number(text))), ""
        _positive(hours)
    except ValueError:
        raise ConfigError(
            f"command line: --budget: {text}, not a budget. Write 1e22, $50000 or 14d."
        ) from None
    peak = hardware.bf16 or hardware.fp16
    assert peak is not None
    share = mfu or hardware.attained
    said = f"{hours:,.0f} device-hours of {hardware.name} at {share:.0%} of its peak, "
    return hours * 3600 * peak * share, said


def _positive(value: float) -> float:
    if value <= 0:
        raise ValueError("must be positive")
    return value


def choices(flops: float) -> list[Choice]:
    """Return what a budget buys: by the rule, by both fits, and overtrained on purpose."""
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
    """Return the least operations for a loss, by Besiroglu et al.'s fit: bisection over budgets."""
    low, high = 1.0, 40.0
    for _ in range(200):
        middle = (low + high) / 2
        reached = BESIROGLU.loss(*BESIROGLU.optimum(10**middle)) <= loss
        low, high = (low, middle) if reached else (middle, high)
    return 10**high


def as_text(flops: float, found: list[Choice]) -> str:
    """Return the table as it is printed."""
    lines = [f"{flops:.3g} FLOPs", ""]
    head = f"{'choice':<34}{'parameters':>12}{'tokens':>10}{'tokens/parameter':>18}"
    lines.append(head + f"{'loss':>8}{'more':>9}{'wasted':>8}")
    for one in found:
        lines.append(
            f"{one.name:<34}{shown_count(one.parameters):>12}{shown_count(one.tokens):>10}"
            f"{one.tokens / one.parameters:>18,.0f}{one.loss:>8.3f}{one.penalty:>+9.4f}"
            f"{one.wasted:>8.1%}"
        )
    lines += [
        "",
        f"Losses are by the fit of {BESIROGLU.name} (arXiv 2404.10102), in nats on their data: "
        f"compare them,",
        "do not expect them. 6 FLOPs a parameter and token, without attention. `wasted` is the "
        "share of the budget",
        "that the best size would not need for the same loss; in return a smaller model costs less "
        "to use.",
    ]
    return "\n".join(lines)


def shown_count(count: float) -> str:
    """Return a number with three digits and a suffix."""
    for suffix in ("", "k", "M", "B", "T"):
        if count < 999.5:
            return f"{count:.3g}{suffix}"
        count /= 1000
    return f"{count:.3g}Q"
