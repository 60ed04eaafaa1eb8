"""Diagnose a run from its metrics: find problems, and advise the user what to try.

The report and `status` show the result. A healthy run has no findings: each rule filters out noise
and judges the most recent part of the run. Must not depend on files or trackers.
"""

import math
import statistics
from collections.abc import Callable, Sequence

from zerolm.optim.spikes import robust_z
from zerolm.report.findings import (
    RECENT_ROWS,
    Finding,
    Point,
    Row,
    finding_at,
    median_of,
    noise_of,
    points_of,
)
from zerolm.report.speed_diagnosis import (
    checkpoint_stalls,
    low_mfu,
    slow_data,
    slow_host,
    slow_rank,
    uneven_experts,
    uneven_pipeline,
)

# Number of earlier losses that a loss is compared with, and threshold in standard deviations.
SPIKE_WINDOW, SPIKE_DEVIATIONS = 32, 8.0
SPIKE_FLOOR = 0.02  # minimum deviation, relative to the loss
MAX_SPIKE_FINDINGS = 3  # if there are more spikes, they are merged into one finding
PLATEAU_BLOCKS, PLATEAU_ROWS_PER_BLOCK = 12, 4
PLATEAU_SHARE = 0.003  # relative decrease of the loss expected when tokens double
NOISE_DEVIATIONS = 3.2  # quantile of Student's t with 10 degrees of freedom: 1 in 200, one-sided
DIVERGED_SHARE, DIVERGED_ROWS = 0.05, 20
CLIPPED_SHARE = 0.5
USUAL_UPDATE_RATIO = (1e-5, 3e-2)  # usual range at the full learning rate; about 1e-3 is typical
OVERFITTED_SHARE, OVERFITTED_EVALUATIONS = 0.01, 3
# "Up to 4 epochs of repeated data are almost as good as new": Muennighoff et al. (2023),
# "Scaling Data-Constrained Language Models".
MAX_EPOCHS = 4.0


def findings(rows: Sequence[Row], events: Sequence[Row] = ()) -> list[Finding]:
    """Return the findings for a run, the most severe first; none if it is healthy.

    Args:
        rows: lines of `metrics.jsonl`, in order; keys may be absent and values may be None.
        events: lines of `events.jsonl`. Events report a spike at any step, but only some steps have
            a row.
    """
    rows = [row for row in rows if "step" in row and "tokens" in row]
    diverged = _divergence(rows)
    found = [*diverged, *_spikes(rows, events)]
    if not diverged:
        found += _plateau(rows)
    for rule in _RULES:
        found += rule(rows)
    return [*found, *slow_host(events)]


def _divergence(rows: Sequence[Row]) -> list[Finding]:
    reported = [row for row in rows if "train/loss" in row]
    points = points_of(reported, "train/loss")
    try_this = (
        "Go back to an earlier checkpoint (--rollback_after does so automatically), and try a "
        "lower --learning_rate, a longer warm-up or stronger gradient_clipping."
    )
    lost = [row for row in reported[-3:] if row["train/loss"] is None]
    if len(lost) == 3:
        text = f"The loss is no longer a finite number. {try_this}"
        return [Finding("divergence", lost[0]["step"], lost[0]["tokens"], text)]
    reach = 8
    if len(points) < DIVERGED_ROWS + 2 * reach:
        return []
    smoothed = [
        Point(points[at].step, points[at].tokens, median_of(points[at - 2 * reach : at + 1]))
        for at in range(2 * reach, len(points))
    ]
    best = min(smoothed, key=lambda point: point.value)
    limit = best.value + max(DIVERGED_SHARE * abs(best.value), 3 * noise_of(points))
    above = 0
    while above < len(smoothed) and smoothed[-1 - above].value > limit:
        above += 1
    if above < max(DIVERGED_ROWS, len(smoothed) // 20):
        return []
    text = (
        f"The loss has stayed above its minimum since step {smoothed[-above].step}: now "
        f"{smoothed[-1].value:.3f}, {best.value:.3f} at step {best.step}. {try_this}"
    )
    return [finding_at("divergence", smoothed[-above], text)]


def _spikes(rows: Sequence[Row], events: Sequence[Row]) -> list[Finding]:
    points = points_of(rows, "train/loss")
    seen: dict[int, Point] = {}
    usual: list[float] = []  # previous values without spikes
    for point in points:
        window = usual[-SPIKE_WINDOW:]
        if len(window) == SPIKE_WINDOW and (
            robust_z(point.value, window, SPIKE_FLOOR) > SPIKE_DEVIATIONS
        ):
            seen[point.step] = point
            if len(seen) > len(usual):
                break  # not spikes but a new level, which `_divergence` reports
        else:
            usual.append(point.value)
    tokens = {row["step"]: row["tokens"] for row in rows}
    reasons: dict[int, str] = {}  # reason for a spike, except a high finite loss
    for event in events:
        if event.get("event") == "spike":
            step, loss, reason = event["step"], event.get("loss"), str(event.get("reason") or "")
            value = float(loss) if isinstance(loss, int | float) else math.nan
            if not math.isfinite(value) or not reason.startswith("train/loss"):
                reasons[step], value = reason or "the step was an anomaly", math.inf
            before = [tokens[each] for each in tokens if each <= step]
            seen[step] = Point(step, max(before, default=0), value)
    groups: list[list[Point]] = []
    interval = points[1].step - points[0].step if len(points) > 1 else 1
    for step in sorted(seen):
        if not groups or step - groups[-1][-1].step > 8 * max(interval, 1):
            groups.append([])
        groups[-1].append(seen[step])
    try_this = (
        "If spikes recur, try a lower --learning_rate, a longer warm-up, beta2 0.95, or stronger "
        "gradient_clipping. `zerolm decode-batch RUN --step N` shows the step's data."
    )
    worst = [max(group, key=lambda point: point.value) for group in groups]
    if len(worst) > MAX_SPIKE_FINDINGS:
        steps = ", ".join(str(point.step) for point in worst[-8:])
        text = f"{len(worst)} spikes, the latest at steps {steps}. {try_this}"
        return [finding_at("spike", worst[-1], text)]
    found = []
    for point in worst:
        text = f"The loss jumped to {point.value:.3f} at step {point.step}."
        if point.step in reasons:
            text = f"Step {point.step}: {reasons[point.step]}."
        found.append(finding_at("spike", point, text, try_this))
    return found


def _plateau(rows: Sequence[Row]) -> list[Finding]:
    """Return a finding if the loss has not fallen over the last half of the tokens, with the
    learning rate near its peak.

    A line is fitted to the medians of twelve blocks over the logarithm of the tokens. The line
    determines the change over the last doubling of the tokens, and the scatter of the medians
    determines the error of that change. A loss that follows a power law falls by more than
    `PLATEAU_SHARE` per doubling until it is about that close to its floor, where the model can
    learn little more from this data.
    """
    points = [point for point in points_of(rows, "train/loss") if point.tokens > 0]
    rates = {point.step: point.value for point in points_of(rows, "train/learning_rate")}
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
    level = median_of(last)
    if -change + NOISE_DEVIATIONS * error >= PLATEAU_SHARE * level:
        return []
    text = (
        f"The loss has been at {level:.3f} since step {last[0].step}, at a learning rate of "
        f"{rates.get(last[-1].step, peak):.1e}. If it should still fall: start to decay the "
        "learning rate, try a larger batch (see train/noise_scale_tokens) or another peak rate, "
        "and check that the data is shuffled and the weights change (train/update_ratio). "
        "Otherwise a model of this size has learned what it can from this data."
    )
    return [finding_at("plateau", last[0], text)]


def _trend(points: Sequence[Point]) -> tuple[float, float]:
    """Fit a line over the logarithm of the tokens; return the change from the first to the last
    point and the standard error of the change.
    """
    size = len(points) / PLATEAU_BLOCKS
    blocks = [
        points[round(number * size) : round((number + 1) * size)]
        for number in range(PLATEAU_BLOCKS)
    ]
    x = [statistics.fmean(math.log(point.tokens) for point in block) for block in blocks]
    y = [median_of(block) for block in blocks]
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
    spread = sum((each - mean_x) ** 2 for each in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    residuals = [b - mean_y - slope * (a - mean_x) for a, b in zip(x, y, strict=True)]
    variance = sum(each**2 for each in residuals) / (PLATEAU_BLOCKS - 2)
    length = math.log(points[-1].tokens / points[0].tokens)
    return slope * length, math.sqrt(variance / spread) * length


def _validation(rows: Sequence[Row]) -> list[Finding]:
    points = points_of(rows, "eval/loss")
    if len(points) <= OVERFITTED_EVALUATIONS:
        return []
    best = min(points, key=lambda point: point.value)
    since = [point for point in points if point.step > best.step]
    limit = best.value + max(OVERFITTED_SHARE * best.value, 3 * noise_of(points))
    training = points_of(rows, "train/loss")
    then = [point for point in training if point.step <= best.step][-RECENT_ROWS:]
    now = training[-RECENT_ROWS:]
    late = since[-OVERFITTED_EVALUATIONS:]
    if len(late) < OVERFITTED_EVALUATIONS or any(point.value <= limit for point in late):
        return []
    if not then or median_of(now) >= median_of(then):
        return []  # the training loss rises too, so this is not overfitting
    observed = (
        f"eval/loss has risen from {best.value:.3f} at step {best.step} to {late[-1].value:.3f}, "
        f"while the training loss fell"
    )
    repeated = {name: epochs for name, epochs in _epochs(rows).items() if epochs > 1.0}
    if repeated:
        names = ", ".join(f"{name} {epochs:.1f} times" for name, epochs in repeated.items())
        text = (
            f"{observed}: the model memorizes its data (read {names}). Stop at that step, or use "
            f"more data, a higher --weight_decay or a smaller model."
        )
        return [finding_at("overfitting", best, text)]
    text = (
        f"{observed}, although no data was repeated: compare eval/<source>/loss, and look for "
        "training data that is no longer like --val_data, or that contains duplicates."
    )
    return [finding_at("validation", best, text)]


def _clipping(rows: Sequence[Row]) -> list[Finding]:
    points = points_of(rows, "train/clipped_share")
    recent = points[-max(RECENT_ROWS, len(points) // 4) :]
    if len(recent) < RECENT_ROWS or statistics.fmean(p.value for p in recent) <= CLIPPED_SHARE:
        return []
    share = statistics.fmean(point.value for point in recent)
    text = (
        f"{share:.0%} of the steps since step {recent[0].step} were clipped, so clipping "
        "determines the step size. Lower --learning_rate, or raise gradient_clipping above the "
        "usual train/grad_norm."
    )
    return [finding_at("clipping", recent[0], text)]


def _update_ratio(rows: Sequence[Row]) -> list[Finding]:
    rates = {point.step: point.value for point in points_of(rows, "train/learning_rate")}
    peak = max(rates.values(), default=0.0)
    full = [
        point
        for point in points_of(rows, "train/update_ratio")
        if rates.get(point.step, 0.0) >= 0.5 * peak
    ]
    recent = full[-RECENT_ROWS:]
    if len(recent) < RECENT_ROWS:
        return []
    ratio, (least, most) = median_of(recent), USUAL_UPDATE_RATIO
    if least <= ratio <= most:
        return []
    text = (
        f"A step changes the weights by {ratio:.1e} of their norm; about 1e-3 is usual, "
        f"{least:.0e} to {most:.0e} not unusual. "
        + (
            "Lower --learning_rate, or warm up longer."
            if ratio > most
            else "The model hardly learns: raise --learning_rate, and check whether the gradient "
            "is clipped to almost nothing."
        )
    )
    return [finding_at("update_ratio", recent[0], text)]


def _epochs(rows: Sequence[Row]) -> dict[str, float]:
    """Return {source: epochs} from the newest row that contains these metrics."""
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
        if epochs <= MAX_EPOCHS:
            continue
        points = points_of(rows, f"data/{name}/epochs")
        at = next(point for point in points if point.value > MAX_EPOCHS)
        text = (
            f"Source {name} has been read {epochs:.1f} times; beyond {MAX_EPOCHS:.0f} epochs "
            f"repetition helps little."
        )
        advice = "Lower the weight of sources that are read too often, or add data."
        found.append(finding_at("repeated_data", at, text, advice))
    return found


_RULES: tuple[Callable[[Sequence[Row]], list[Finding]], ...] = (
    _validation,
    _clipping,
    _update_ratio,
    _repeated_data,
    slow_data,
    low_mfu,
    slow_rank,
    uneven_experts,
    uneven_pipeline,
    checkpoint_stalls,
)
