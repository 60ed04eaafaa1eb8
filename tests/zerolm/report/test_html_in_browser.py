"""`report.html` in a real browser: it draws, requests nothing, and reacts to the user."""

import base64
import csv
import io
import json
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.chromium import Browser
from tests.zerolm.report.run_directories import (
    STEP_TOKENS,
    metrics,
    write_heartbeats,
    write_lines,
    write_run,
)
from zerolm.report import html as report

EVIL = "</script><img src=x onerror=\"window.hacked=1\"><svg onload='window.hacked=1'>&amp;{{7*7}}"
LOSSES = [row for row in metrics(40, spike=30) if "train/loss" in row]
PANELS = "document.querySelectorAll('.panel')"
PLACE = """(() => {
  const box = document.querySelector('.panel svg').getBoundingClientRect();
  return [box.left, box.top, box.width, box.height];
})()"""
# The lowest contrast of words, and of curves, to their ground. WCAG 2.2 asks for 4.5 and 3.
CONTRAST = """(() => {
  const number = (name) => {
    const text = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    return [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16) / 255)
      .map((value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
      .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
  };
  const contrast = (one, other) => {
    const [low, high] = [number(one), number(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const words = ['--ink', '--soft', '--accent', '--bad', '--notable', '--good'];
  const curves = [...Array(8).keys()].map((index) => `--c${index}`);
  return [Math.min(...words.map((name) => contrast(name, '--card'))),
          Math.min(...curves.map((name) => contrast(name, '--card')))];
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    run = write_run(tmp_path_factory.mktemp("runs") / "first", wandb_group=EVIL)
    texts = [{"step": step, "tokens": step, "prompt": EVIL, "text": EVIL} for step in (10, 20)]
    write_lines(run / "samples.jsonl", texts)
    with open(run / "events.jsonl", "a") as file:
        file.write(json.dumps({"event": "failed", "step": 40, "reason": EVIL}) + "\n")
    return report.write_report([run])


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_report_draws_and_requests_nothing(browser, page, width, dark) -> None:
    browser.requests.clear()
    browser.messages.clear()
    browser.open(page, width, 844, dark=dark)
    assert browser.messages == []
    assert browser.requests == [page.as_uri()], "nothing but the file itself"
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    titles = browser.evaluate("[...document.querySelectorAll('.title')].map(e => e.textContent)")
    assert titles[:3] == ["Loss", "Loss by source", "Learning rate"]
    assert browser.evaluate("document.querySelectorAll('.event.notable').length") >= len(titles)
    assert browser.evaluate("window.hacked === undefined && !document.querySelector('main img')")
    assert browser.evaluate("document.querySelector('.strip article p').textContent") == EVIL
    words, curves = browser.evaluate(CONTRAST)
    assert words >= 4.5 and curves >= 3.0, "readable, also in the dark"


def test_curves_are_drawn_at_their_values(browser, page) -> None:
    """For the paths of a constant learning rate, and of epochs, which grow with the x-axis."""
    browser.open(page, 1280, 844)
    path = browser.evaluate(f"{PANELS}[2].querySelector('.curve').getAttribute('d')")
    points = [tuple(map(float, point.split())) for point in path[1:].split("L")]
    assert len(points) == 40 and len({y for _, y in points}) == 1
    gaps = [right - left for (left, _), (right, _) in pairwise(points)]
    assert max(gaps) - min(gaps) <= 0.21, "equal steps are equally far apart"


def test_a_constant_has_one_tick_at_its_value(browser, tmp_path) -> None:
    """Also where rounding differs, and for a count that is 0; an event of no step has no link."""
    rates = [1e-3, 1e-3 * (1 + 2e-16)]
    rows = [{"step": step, "tokens": 700 * step, "train/loss": 5 / step,
             "train/learning_rate": rates[step % 2], "health/skipped_steps": 0}
            for step in range(1, 41)]  # fmt: skip
    run = write_run(tmp_path / "run")
    write_lines(run / "metrics.jsonl", rows)
    with open(run / "events.jsonl", "a") as file:
        file.write(
            json.dumps({"event": "upload_failed", "step": -1, "reason": "no network"}) + "\n"
        )
    browser.open(report.write_report([run]), 1280, 844)
    labels = """(title) => [...document.querySelectorAll('.panel')].filter(
      (panel) => panel.querySelector('.title').textContent === title).flatMap((panel) =>
      [...panel.querySelectorAll('svg text[text-anchor=end]')].filter(
        (text) => Number(text.getAttribute('x')) < 100).map((text) => text.textContent))"""
    assert browser.evaluate(f"({labels})('Learning rate')") == ["0.001"]
    assert browser.evaluate(f"({labels})('Refused steps')") == ["0"]
    steps = "[...document.querySelectorAll('.events [data-step]')].map(e => e.dataset.step)"
    assert "-1" not in browser.evaluate(steps)


def test_every_chart_has_units_and_two_ticks_on_each_axis(browser, tmp_path) -> None:
    """For ranges of 1.3 to a million, linear and logarithmic."""
    factors = (1.3, 2, 5, 9.9, 11, 15, 31, 70, 99, 150, 500, 2000, 1e4, 1e6)
    rows = [
        {"step": step, "tokens": 700 * step, "train/loss": 5 / step}
        | {f"other/{n}": 0.023 * factor ** (step / 40) for n, factor in enumerate(factors)}
        for step in range(1, 41)
    ]
    run = write_run(tmp_path / "run")
    write_lines(run / "metrics.jsonl", rows)
    browser.open(report.write_report([run], tmp_path / "page.html"), 1440, 844)
    for shown in ("tokens", "optimizer steps", "training time"):
        few = browser.evaluate(f"""(() => {{
          const labels = (panel, anchor, text) => [...panel.querySelectorAll('svg > text')].filter(
            (one) => one.getAttribute('text-anchor') === anchor && one.textContent !== text);
          return [...{PANELS}].filter((panel) => labels(panel, 'end').length < 2
            || labels(panel, 'middle', '{shown}').length < 2
            || !panel.querySelector('svg').textContent.includes('{shown}'))
            .map((panel) => panel.querySelector('.title').textContent);
        }})()""")
        assert few == [], shown
        browser.evaluate(f"""[...{PANELS}].forEach((panel) => panel.querySelector(
          '.buttons button').click())""")  # each one to the other scale
        browser.evaluate(f"""[...document.querySelectorAll('.axes button')][
          {1 if shown == "tokens" else 2}].click()""")
        browser.evaluate("new Promise((drawn) => setTimeout(() => drawn(true), 200))")


def test_the_values_of_a_chart_are_saved_as_csv(browser, page) -> None:
    browser.open(page, 1280, 844)
    text = browser.evaluate(f"""new Promise((saved) => {{
      URL.createObjectURL = (blob) => {{ blob.text().then(saved); return '#'; }};
      [...{PANELS}[0].querySelectorAll('button')].find((one) => one.textContent === 'CSV').click();
    }})""")
    found = list(csv.DictReader(io.StringIO(text)))
    unit = "Loss, nats per token"
    losses = {int(row["step"]): float(row[unit]) for row in found if row["curve"] == "train"}
    assert losses == pytest.approx({row["step"]: row["train/loss"] for row in LOSSES}, rel=1e-6)
    assert [row["tokens"] for row in found[:2]] == [str(STEP_TOKENS), str(2 * STEP_TOKENS)]


@pytest.mark.parametrize("width", [1440, 1000, 390])
def test_values_fit_into_their_tiles_in_one_line(browser, tmp_path, width) -> None:
    rows = metrics(40)
    rows[-1] |= {"throughput/tokens_per_second": 987_654_321.0, "checkpoint/stall_seconds": 3.0,
                 "eval/hellaswag/acc_norm": 0.3, "eval/core": 0.2, "eval/bits_per_byte": 1.0,
                 "health/skipped_steps": 12, "eval/perplexity": 123456.7}  # fmt: skip
    run = write_run(tmp_path / "run")
    write_lines(run / "metrics.jsonl", rows)
    browser.open(report.write_report([run], price_per_hour=2.5), width, 844)
    lines = browser.evaluate("""[...document.querySelectorAll('.tiles dd')].map((one) =>
      [one.textContent, one.scrollWidth > one.clientWidth || one.clientHeight > 40])""")
    assert len(lines) > 10 and not [text for text, broken in lines if broken]


def test_hovering_zooming_and_toggling_work(browser, page) -> None:
    browser.open(page, 1280, 844)
    browser.evaluate("document.querySelector('.panel svg').scrollIntoView({block: 'center'})")
    left, top, width, height = browser.evaluate(PLACE)
    inside = left + 44, width - 44 - 12  # the axis, from its beginning
    x = inside[0] + inside[1] * 30 / 40
    browser.mouse("mouseMoved", x, top + height / 2)
    tip = browser.evaluate("document.querySelector('.panel .tip').textContent")
    assert "step 30" in tip and f"{30 * STEP_TOKENS // 1000}k tokens" in tip
    assert "spike" in tip and "deviations above" in tip

    browser.mouse("mousePressed", x, top + 100, button="left", clickCount=1)
    browser.mouse("mouseMoved", x + 100, top + 100, button="left", buttons=1)
    browser.mouse("mouseReleased", x + 100, top + 100, button="left", clickCount=1)
    browser.wait("document.body.classList.contains('zoomed')")
    browser.evaluate("document.querySelector('.reset').click()")
    browser.wait("!document.body.classList.contains('zoomed')")

    count = f"{PANELS}[1].querySelectorAll('.curve').length"
    before = browser.evaluate(count)
    browser.evaluate(f"{PANELS}[1].querySelector('.legend button').click()")
    browser.wait(f"{count} < {before}")
    browser.evaluate("[...document.querySelectorAll('.axes button')][2].click()")
    browser.wait("document.querySelector('.panel svg').textContent.includes(' s')")


def test_touch_taps_pinches_and_scrolls_work(browser, page) -> None:
    browser.open(page, 390, 844)
    browser.evaluate("document.querySelector('.panel svg').scrollIntoView({block: 'center'})")
    left, top, width, height = browser.evaluate(PLACE)
    middle = top + height / 2

    def touch(kind: str, *places: float) -> None:
        points = [{"x": left + x, "y": middle, "id": n} for n, x in enumerate(places)]
        browser.call("Input.dispatchTouchEvent", type=kind, touchPoints=points)

    touch("touchStart", 44 + (width - 56) * 30 / 40)
    touch("touchEnd")
    assert "spike" in browser.evaluate("document.querySelector('.panel .tip').textContent")
    touch("touchStart", width * 0.45, width * 0.55)
    for share in (0.05, 0.15, 0.25):
        touch("touchMove", width * (0.45 - share), width * (0.55 + share))
    touch("touchEnd")
    browser.wait("document.body.classList.contains('zoomed')")
    before = browser.evaluate("scrollY")
    browser.call("Input.synthesizeScrollGesture", x=left + 100, y=middle, yDistance=-200)
    assert browser.evaluate("scrollY") > before, "a chart does not hold the page"


def test_a_printed_report_is_light_and_has_no_buttons(browser, page) -> None:
    browser.open(page, 390, 844, dark=True)
    pdf = base64.b64decode(browser.call("Page.printToPDF")["data"])
    assert pdf.startswith(b"%PDF") and len(pdf) > 20_000
    dark = {"name": "prefers-color-scheme", "value": "dark"}
    browser.call("Emulation.setEmulatedMedia", media="print", features=[dark])
    assert (
        browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    )
    assert (
        browser.evaluate("getComputedStyle(document.querySelector('.toolbar')).display") == "none"
    )


def test_compared_runs_have_different_colours(browser, tmp_path) -> None:
    runs = [write_run(tmp_path / name, seed=number) for number, name in enumerate(("one", "two"))]
    both = report.write_report(runs, tmp_path / "both.html")
    browser.messages.clear()
    browser.open(both, 1280, 844)
    text = browser.evaluate("document.body.innerText")
    assert "losses are bit-identical at all 40 common steps" in text and "settings.seed" in text
    colours = (
        "[...new Set([...document.querySelectorAll('.panel .curve')].map(e => e.style.stroke))]"
    )
    assert sorted(browser.evaluate(colours)) == ["var(--c0)", "var(--c1)"]
    dashes = (
        "[...document.querySelectorAll('.panel .curve.thin')]"
        ".map(e => e.getAttribute('stroke-dasharray'))"
    )
    assert "6 3" in browser.evaluate(dashes), "an evaluation differs from what it is drawn with"
    keys = "document.querySelectorAll('.legend .sample path[stroke-dasharray]').length"
    assert browser.evaluate(keys) > 0, "and the legend shows how"
    assert browser.messages == []


def test_the_star_of_an_evaluation_is_at_its_best_value(browser, tmp_path) -> None:
    """Of 50 evaluations, of which the table shows each second one and the best."""
    draw, keys = random.Random(3), ("loss", "bits_per_byte", "core", "hellaswag/acc", "wiki/bpb")
    rows = [
        {"step": step, "tokens": step, **{f"eval/{key}": draw.random() for key in keys},
         "eval/hellaswag/items": 1000 + step, "eval/odd/unknown": step}
        for step in range(1, 51)
    ]  # fmt: skip
    run = write_run(tmp_path / "run")
    write_lines(run / "metrics.jsonl", [{"step": 1, "tokens": 1, "train/loss": 5.0}, *rows])
    browser.open(report.write_report([run], tmp_path / "page.html"), 1280, 844)
    table = browser.evaluate("""(() => {
      const table = document.querySelector('table.evaluations');
      const keys = [...table.querySelectorAll('thead th')].map(
        (cell) => cell.querySelector('[title]')?.title.slice(5));
      return [...table.querySelectorAll('tbody tr')].flatMap((row) => [...row.children].flatMap(
        (cell, index) => cell.querySelector('.best')
          ? [[keys[index], Number(row.children[0].textContent)]] : []));
    })()""")
    at_best = {}
    for key in keys:
        pick = max if key in ("core", "hellaswag/acc") else min
        at_best[key] = pick(rows, key=lambda row: row[f"eval/{key}"])["step"]
    assert dict(map(tuple, table)) == at_best and len(table) == len(keys)
    heads = browser.evaluate("document.querySelector('.evaluations thead').innerText").split("\t")
    assert heads[2:5] == ["Loss", "Bits per byte", "CORE"] and "HellaSwag, accuracy" in heads


@pytest.mark.parametrize(
    ("seconds", "shown"), [(59.99, "1 min 0 s"), (119.7, "2 min 0 s"), (3599.7, "1 h 0 min")]
)
def test_a_time_left_never_has_sixty_seconds(browser, tmp_path, seconds, shown) -> None:
    run = write_run(tmp_path / "run", ended=None)
    write_heartbeats(run)
    rows = [{"step": 1, "tokens": 0, "train/loss": 5.0}]
    rows[0]["throughput/tokens_per_second"] = 100 * STEP_TOKENS / seconds
    write_lines(run / "metrics.jsonl", rows)
    browser.open(report.write_report([run], tmp_path / "page.html"), 1280, 844)
    assert f"{shown} to go" in browser.evaluate("document.querySelector('.progress').textContent")
