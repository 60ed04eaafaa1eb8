"""What a run's metrics say about its health, in words, with what to try. Pure: rows in, words out.

Comes beside or after training: whoever shows a run (its page, a terminal, an alert) asks here.
Knows the keys of docs/metrics.md; must not know files, torch or trackers. A healthy run has no
findings: every rule asks that noise be excluded before it speaks, and looks at the newest part.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from zerolm.spike import MAD_TO_DEVIATION, robust_z

Row = Mapping[str, Any]

RECENT_ROWS = 20  # that speed and update sizes are judged by
SPIKE_WINDOW, SPIKE_DEVIATIONS = 32, 8.0  # reported losses before, and how far above them
SPIKE_FLOOR = 0.02  # least scale of a deviation, as a share of the loss
MOST_SPIKES_APART = 3  # more of them are one finding
PLATEAU_BLOCKS, PLATEAU_ROWS_PER_BLOCK = 12, 4
PLATEAU_SHARE = 0.003  # of the loss: a doubling of the tokens must bring at least this
NOISE_DEVIATIONS = 3.2  # of Student's t with 10 degrees of freedom: 1 in 200, one-sided
DIVERGED_SHARE, DIVERGED_ROWS = 0.05, 20
CLIPPED_SHARE = 0.5
USUAL_UPDATE_RATIO = (1e-5, 3e-2)  # of a step at the full learning rate; about 1e-3 is typical
DATA_SHARE = 0.1
LOW_MFU, FALLEN_MFU = 0.1, 0.75
SLOW_RANK_RATIO, SLOW_RANK_ROWS = 1.25, 0.7
STALL_SHARE = 0.05
OVERFITTED_SHARE, OVERFITTED_EVALUATIONS = 0.01, 3
# "Up to 4 epochs of repeated data are almost as good as new": Muennighoff et al. (2023),
# "Scaling Data-Constrained Language Models".
MOST_EPOCHS = 4.0


@dataclass(frozen=True)
class Finding:
    """One thing to know about a run.

    Attributes:
        kind: "divergence", "spike", "plateau", "overfitting", "validation", "clipping",
            "update_ratio", "repeated_data", "slow_data", "low_mfu", "falling_mfu", "slow_rank" or
            "checkpoint_stalls".
        step, tokens: where it is in the run.
        text: one or two sentences: what is seen, and what to try.
    """

    kind: str
    step: int
    tokens: int
    text: str


@dataclass(frozen=True)
class _Point:
    step: int
    tokens: int
    value: float


def findings(rows: Sequence[Row], events: Sequence[Row] = ()) -> list[Finding]:
    """Return what stands out in a run, the gravest first. Empty for a healthy one.

    Args:
        rows: of `metrics.jsonl`, in order; keys may be absent, values None.
        events: of `events.jsonl`; the spikes in it were judged step by step, the rows are samples.
    """
    rows = [row for row in rows if "step" in row and "tokens" in row]
    diverged = _divergence(rows)
    found = [*diverged, *_spikes(rows, events)]
    if not diverged:
        found += _plateau(rows)
    for rule in _RULES:
        found += rule(rows)
    return found


def _points(rows: Iterable[Row], key: str) -> list[_Point]:
    """Return the finite values of a key."""
    return [
        _Point(row["step"], row["tokens"], float(row[key]))
        for row in rows
        if isinstance(row.get(key), int | float) and math.isfinite(row[key])
    ]


def _recent(rows: Iterable[Row], key: str) -> list[_Point]:
    """Return the last `RECENT_ROWS` values of a key; empty when there are fewer."""
    points = _points(rows, key)[-RECENT_ROWS:]
    return points if len(points) == RECENT_ROWS else []


def _median(points: Iterable[_Point]) -> float:
    return statistics.median(point.value for point in points)


def _noise(points: Sequence[_Point]) -> float:
    """Return the standard deviation of what a smooth curve does not explain, robustly."""
    steps = [abs(b.value - a.value) for a, b in pairwise(points)]
    return MAD_TO_DEVIATION * statistics.median(steps) / math.sqrt(2) if steps else 0.0


def _finding(kind: str, at: _Point, text: str) -> Finding:
    return Finding(kind, at.step, at.tokens, text)


# ---- What is learned


def _divergence(rows: Sequence[Row]) -> list[Finding]:
    reported = [row for row in rows if "train/loss" in row]
    points = _points(reported, "train/loss")
    try_this = (
        "Go back to a checkpoint of before (the run does so by itself with --rollback_after), and "
        "try a lower --learning_rate, a longer warm-up or stronger gradient_clipping."
    )
    lost = [row for row in reported[-3:] if row["train/loss"] is None]
    if len(lost) == 3:
        text = f"The loss is not a finite number any more. {try_this}"
        return [Finding("divergence", lost[0]["step"], lost[0]["tokens"], text)]
    reach = 8
    if len(points) < DIVERGED_ROWS + 2 * reach:
        return []
    smoothed = [
        _Point(points[at].step, points[at].tokens, _median(points[at - 2 * reach : at + 1]))
        for at in range(2 * reach, len(points))
    ]
    best = min(smoothed, key=lambda point: point.value)
    limit = best.value + max(DIVERGED_SHARE * abs(best.value), 3 * _noise(points))
    above = 0
    while above < len(smoothed) and smoothed[-1 - above].value > limit:
        above += 1
    if above < max(DIVERGED_ROWS, len(smoothed) // 20):
        return []
    text = (
        f"The loss has stayed above its best since step {smoothed[-above].step}: "
        f"{smoothed[-1].value:.3f}, it was {best.value:.3f} at step {best.step}. {try_this}"
    )
    return [_finding("divergence", smoothed[-above], text)]


def _spikes(rows: Sequence[Row], events: Sequence[Row]) -> list[Finding]:
    points = _points(rows, "train/loss")
    seen: dict[int, _Point] = {}
    usual: list[float] = []  # the values before, without those that stand out
    for point in points:
        window = usual[-SPIKE_WINDOW:]
        if len(window) == SPIKE_WINDOW and (
            robust_z(point.value, window, SPIKE_FLOOR) > SPIKE_DEVIATIONS
        ):
            seen[point.step] = point
            if len(seen) > SPIKE_WINDOW and len(seen) > len(usual):
                break  # not spikes: another level, which `_divergence` tells of
        else:
            usual.append(point.value)
    tokens = {row["step"]: row["tokens"] for row in rows}
    for event in events:
        if event.get("event") == "spike":
            step = event["step"]
            loss = event.get("loss")
            value = loss if isinstance(loss, int | float) else math.inf
            before = [tokens[each] for each in tokens if each <= step]
            seen[step] = _Point(step, max(before, default=0), value)
    groups: list[list[_Point]] = []
    interval = points[1].step - points[0].step if len(points) > 1 else 1
    for step in sorted(seen):
        if not groups or step - groups[-1][-1].step > 8 * max(interval, 1):
            groups.append([])
        groups[-1].append(seen[step])
    try_this = (
        "If they come back: a lower --learning_rate, a longer warm-up, beta2 0.95, stronger "
        "gradient_clipping. `python -m zerolm decode-batch RUN --step N` shows what the step read."
    )
    worst = [max(group, key=lambda point: point.value) for group in groups]
    if len(worst) > MOST_SPIKES_APART:
        steps = ", ".join(str(point.step) for point in worst[-8:])
        text = f"{len(worst)} loss spikes, the last ones at steps {steps}. {try_this}"
        return [_finding("spike", worst[-1], text)]
    return [
        _finding(
            "spike", point, f"The loss jumped to {point.value:.3f} at step {point.step}. {try_this}"
        )
        for point in worst
    ]


def _plateau(rows: Sequence[Row]) -> list[Finding]:
    """Find that the loss stands still since half of the tokens, at a learning rate near its peak.

    The change over the last doubling of the tokens is that of a line through the medians of twelve
    blocks over the logarithm of the tokens; its error is from their scatter. A power law of any
    age loses more per doubling than `PLATEAU_SHARE` of the loss until it is within that of
    its floor, where there is nothing more to learn from this data.
    """
    points = [point for point in _points(rows, "train/loss") if point.tokens > 0]
    rates = {point.step: point.value for point in _points(rows, "train/learning_rate")}
    peak = max(rates.values(), default=0.0)
    if not points or peak <= 0.0:
        return []
    half = points[-1].tokens / 2
    warm = next((p.tokens for p in points if rates.get(p.step, 0.0) >= 0.9 * peak), math.inf)
    last = [point for point in points if point.tokens >= half]
    enough = PLATEAU_BLOCKS * PLATEAU_ROWS_PER_BLOCK
    low = any(rates.get(point.step, peak) < 0.5 * peak for point in last)
    if len(last) < enough or low or half < 2 * warm:
        return []
    change, error = _trend(last)
    level = _median(last)
    if -change + NOISE_DEVIATIONS * error >= PLATEAU_SHARE * level:
        return []
    text = (
        f"The loss stands at {level:.3f} since step {last[0].step}, while the learning rate is "
        f"{rates[last[-1].step]:.1e}. If it should still fall: begin to lower the learning rate, "
        f"try a larger batch (see train/noise_scale_tokens) or another peak, check that the data "
        f"is shuffled and the weights change (train/update_ratio); else the model has learned what "
        f"this data has for its size."
    )
    return [_finding("plateau", last[0], text)]


def _trend(points: Sequence[_Point]) -> tuple[float, float]:
    """Return the change of the value from the first to the last point, and its standard error."""
    size = len(points) / PLATEAU_BLOCKS
    blocks = [
        points[round(number * size) : round((number + 1) * size)]
        for number in range(PLATEAU_BLOCKS)
    ]
    x = [statistics.fmean(math.log(point.tokens) for point in block) for block in blocks]
    y = [_median(block) for block in blocks]
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
    spread = sum((each - mean_x) ** 2 for each in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    residuals = [b - mean_y - slope * (a - mean_x) for a, b in zip(x, y, strict=True)]
    variance = sum(each**2 for each in residuals) / (PLATEAU_BLOCKS - 2)
    length = math.log(points[-1].tokens / points[0].tokens)
    return slope * length, math.sqrt(variance / spread) * length


def _validation(rows: Sequence[Row]) -> list[Finding]:
    points = _points(rows, "eval/loss")
    if len(points) <= OVERFITTED_EVALUATIONS:
        return []
    best = min(points, key=lambda point: point.value)
    since = [point for point in points if point.step > best.step]
    limit = best.value + max(OVERFITTED_SHARE * best.value, 3 * _noise(points))
    training = _points(rows, "train/loss")
    then = [point for point in training if point.step <= best.step][-RECENT_ROWS:]
    now = training[-RECENT_ROWS:]
    late = since[-OVERFITTED_EVALUATIONS:]
    if len(late) < OVERFITTED_EVALUATIONS or any(point.value <= limit for point in late):
        return []
    if not then or _median(now) >= _median(then):
        return []  # both rise: that is no gap
    seen = (
        f"eval/loss has risen from {best.value:.3f} at step {best.step} to {late[-1].value:.3f}, "
        f"while the training loss falls"
    )
    repeated = {name: epochs for name, epochs in _epochs(rows).items() if epochs > 1.0}
    if repeated:
        names = ", ".join(f"{name} {epochs:.1f} times" for name, epochs in repeated.items())
        text = (
            f"{seen}: the model learns its data by heart (read {names}). Stop at that step, or "
            f"bring more data, more --weight_decay or a smaller model."
        )
        return [_finding("overfitting", best, text)]
    text = (
        f"{seen}, on data that it has not yet seen twice: compare eval/<source>/loss, and look for "
        f"training data that has become unlike --val_data, or holds duplicates."
    )
    return [_finding("validation", best, text)]


def _clipping(rows: Sequence[Row]) -> list[Finding]:
    points = _points(rows, "train/clipped_share")
    recent = points[-max(RECENT_ROWS, len(points) // 4) :]
    if len(recent) < RECENT_ROWS or statistics.fmean(p.value for p in recent) <= CLIPPED_SHARE:
        return []
    share = statistics.fmean(point.value for point in recent)
    text = (
        f"{share:.0%} of the steps since step {recent[0].step} were clipped: it is the clipping "
        f"that decides how long a step is. Lower --learning_rate, or raise gradient_clipping above "
        f"the usual train/grad_norm."
    )
    return [_finding("clipping", recent[0], text)]


def _update_ratio(rows: Sequence[Row]) -> list[Finding]:
    rates = {point.step: point.value for point in _points(rows, "train/learning_rate")}
    peak = max(rates.values(), default=0.0)
    full = [
        point
        for point in _points(rows, "train/update_ratio")
        if rates.get(point.step, 0.0) >= 0.5 * peak
    ]
    recent = full[-RECENT_ROWS:]
    if len(recent) < RECENT_ROWS:
        return []
    ratio, (least, most) = _median(recent), USUAL_UPDATE_RATIO
    if least <= ratio <= most:
        return []
    text = (
        f"A step changes the weights by {ratio:.1e} of their norm; about 1e-3 is usual, "
        f"{least:.0e} to {most:.0e} not unusual. "
        + (
            "Lower --learning_rate, or warm up longer."
            if ratio > most
            else "Next to nothing is learned: raise --learning_rate, and look whether the gradient "
            "is clipped to almost nothing."
        )
    )
    return [_finding("update_ratio", recent[0], text)]


def _epochs(rows: Sequence[Row]) -> dict[str, float]:
    """Return how often each source has been read."""
    for row in reversed(rows):
        found = {
            key[len("data/") : -len("/epochs")]: float(value)
            for key, value in row.items()
            if key.startswith("data/") and key.endswith("/epochs") and value is not None
        }
        if found:
            return found
    return {}


def _repeated_data(rows: Sequence[Row]) -> list[Finding]:
    found = []
    for name, epochs in _epochs(rows).items():
        if epochs <= MOST_EPOCHS:
            continue
        points = _points(rows, f"data/{name}/epochs")
        at = next(point for point in points if point.value > MOST_EPOCHS)
        text = (
            f"Source {name} has been read {epochs:.1f} times; beyond {MOST_EPOCHS:.0f} another "
            f"time brings little. Lower its weight, or bring more data."
        )
        found.append(_finding("repeated_data", at, text))
    return found


# ---- How fast


def _slow_data(rows: Sequence[Row]) -> list[Finding]:
    waited = _recent(rows, "throughput/data_seconds")
    steps = _recent(rows, "throughput/step_seconds")
    if not waited or not steps:
        return []
    share = sum(point.value for point in waited) / max(sum(point.value for point in steps), 1e-9)
    if share <= DATA_SHARE:
        return []
    text = (
        f"{share:.0%} of a step waits for data. Raise --num_workers, or bring the shards to a "
        f"faster disk."
    )
    return [_finding("slow_data", waited[0], text)]


def _mfu(rows: Sequence[Row]) -> list[Finding]:
    points, recent = _points(rows, "throughput/mfu"), _recent(rows, "throughput/mfu")
    if not recent:
        return []
    now = _median(recent)
    earlier = points[:-RECENT_ROWS]
    if len(earlier) >= RECENT_ROWS:
        usual = _median(earlier)
        if now < FALLEN_MFU * usual:
            text = (
                f"MFU has fallen to {now:.1%}, it was {usual:.1%}. Look at data_seconds, the "
                f"slowest rank, memory near its limit, other users of the machines, and hot "
                f"devices that lower their clock."
            )
            return [_finding("falling_mfu", recent[0], text)]
    if now >= LOW_MFU:
        return []
    text = (
        f"MFU is {now:.1%}. Try a larger --micro_batch_size, a lower ZeRO stage or no offload if "
        f"memory allows, --compile; `python -m launch plan` compares."
    )
    return [_finding("low_mfu", recent[0], text)]


def _slow_rank(rows: Sequence[Row]) -> list[Finding]:
    ranks = _recent(rows, "throughput/slowest_rank")
    seconds = _recent(rows, "throughput/slowest_rank_seconds")
    means = _recent(rows, "throughput/mean_rank_seconds")
    if not ranks or not seconds or not means:
        return []
    rank = statistics.mode(point.value for point in ranks)
    times = [
        slow.value / mean.value
        for which, slow, mean in zip(ranks, seconds, means, strict=True)
        if which.value == rank and mean.value > 0.0 and slow.value > SLOW_RANK_RATIO * mean.value
    ]
    if len(times) < SLOW_RANK_ROWS * RECENT_ROWS:
        return []
    text = (
        f"Rank {rank:.0f} needs {statistics.median(times):.1f} times as long as the mean of all, "
        f"and all wait for it. Look at its host, device and disk (ranks/ names the host; "
        f"`python -m launch doctor` compares hosts)."
    )
    return [_finding("slow_rank", ranks[0], text)]


def _checkpoint_stalls(rows: Sequence[Row]) -> list[Finding]:
    stalls = _points(rows, "checkpoint/stall_seconds")
    if len(stalls) < 3:
        return []
    seconds, before = 0.0, 0
    for point in _points(rows, "throughput/step_seconds"):
        seconds += point.value * (point.step - before)
        before = point.step
    stalled = sum(point.value for point in stalls)
    if stalled <= STALL_SHARE * (seconds + stalled):
        return []
    waited = sum(point.value for point in _points(rows, "checkpoint/wait_seconds"))
    cause = (
        "mostly for the checkpoint before, which was still being written: raise "
        "--checkpoint_interval, or write to a faster disk."
        if waited > stalled / 2
        else "mostly for the copy to host memory: raise --checkpoint_interval."
    )
    share = stalled / (seconds + stalled)
    text = f"Training stood still for checkpoints {share:.0%} of the time, {cause}"
    return [_finding("checkpoint_stalls", stalls[0], text)]


_RULES: tuple[Callable[[Sequence[Row]], list[Finding]], ...] = (
    _validation,
    _clipping,
    _update_ratio,
    _repeated_data,
    _slow_data,
    _mfu,
    _slow_rank,
    _checkpoint_stalls,
)
