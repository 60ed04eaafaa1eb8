"""`report.html`: a self-contained HTML file about one run, or about several runs side by side.

`zerolm.report.run_history` reads the run directories, and `zerolm.report.report_data` turns them
into JSON. The scripts in `assets/` draw the report in the browser; they insert a run's text as
plain text, never as markup.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerolm.common.errors import ConfigError
from zerolm.common.files import write_atomically
from zerolm.report.page import ASSETS, page
from zerolm.report.report_data import report_data
from zerolm.report.run_history import read_runs
from zerolm.run_dir.files import RunFiles

SCRIPTS = ("format.js", "axis.js", "view.js", "elements.js", "chart.js", "sections.js", "page.js")

Json = dict[str, Any]


def write_report(
    run_dirs: Sequence[str | Path],
    output: str | Path | None = None,
    price_per_hour: float | None = None,
) -> Path:
    """Write the report on one run, or on a comparison of several runs.

    Args:
        run_dirs: run directories; the runs may still be in progress.
        output: file to write; default: `report.html` in the first run directory.
        price_per_hour: dollars per device-hour; without it, the report shows no price.

    Returns:
        The path of the report.

    Raises:
        ConfigError: some directories are not run directories, all of which are listed, or the
            report cannot be written.
    """
    runs = read_runs(run_dirs)
    output = Path(output) if output is not None else RunFiles(runs[0].run_dir).report
    text = render(report_data(runs, price_per_hour))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(output, text.encode(), many_writers=True)
    except OSError as error:
        raise ConfigError(
            f"{output}: cannot be written: {error.strerror}. Choose another --output."
        ) from error
    return output


def render(data: Json) -> str:
    """Return the HTML of a report with this data."""
    return page(ASSETS / "run.html", ("run.css",), SCRIPTS, title="Training run", data=data)
