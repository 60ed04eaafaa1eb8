"""`zerolm sweep`: start a run with `zerolm train` for each point of a grid, and report the optimum.

All points are checked before the first one starts. Each point is an ordinary run, so the same
command resumes a sweep that was stopped or killed, and skips finished runs.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from launch.command.train import split_flags
from launch.experiments.grid import Point, grid, read_axes
from launch.render.node import add_size_flags
from launch.render.render import add_job_flags, job_from, write_job
from launch.render.templates import slurm_script
from zerolm.common import machine, processes
from zerolm.common.command_line import count
from zerolm.common.errors import EXIT_BUG, EXIT_DONE, EXIT_STOPPED, ConfigError
from zerolm.common.process_tree import end_with_parent
from zerolm.common.shipped import module_command
from zerolm.common.values import duration
from zerolm.config.settings import COMMAND_LINE
from zerolm.engine.launcher_options import LAUNCHER_FLAGS
from zerolm.parts.parse import parse_settings
from zerolm.run_dir.events import DONE, GAVE_UP

LOG = "console.log"  # file in each run directory with the output of `zerolm train`
PLACES = ("hostfile", "num_nodes", "include", "exclude", "node_rank")  # launcher flags
POLL_SECONDS = 0.2


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "%(prog)s --set NAME=V1,V2 [--set ...] --run_dir DIR [flags] [zerolm train's flags]"
    )
    parser.description = (
        "Start a run for each combination of the values, each in a subdirectory of DIR, then "
        "print and plot the final losses and the best value. The same command skips finished runs "
        "and resumes the others. All other flags are passed to zerolm train."
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=V1,V2", dest="axes",
        help="a setting and its values, repeatable: --set learning_rate=1e-3,2e-3 --set seed=0,1",
    )  # fmt: skip
    parser.add_argument(
        "--model_config", action="append", default=[], metavar="PATH",
        help="a Hugging Face config.json; repeat it to make an axis of the grid",
    )  # fmt: skip
    parser.add_argument(
        "--jobs", type=count, metavar="N",
        help="number of concurrent runs, which share this machine's devices and cores (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--table", action="store_true", help="start nothing: print and plot existing results"
    )
    parser.add_argument(
        "--render", metavar="FILE",
        help="start nothing: write a Slurm array job with a task for each run",
    )  # fmt: skip
    group = parser.add_argument_group("the job file of --render")
    add_size_flags(group, default=1)
    add_job_flags(group)


@dataclass
class Sweep:
    """The runs of a sweep.

    Attributes:
        launcher: {launcher flag: value}.
        flags: pretrain.py flags shared by all points.
        devices: IDs of the visible devices; empty on a CPU.
        tokens: {name of a point: number of tokens that its complete run trains on}.
    """

    run_dir: Path
    points: list[Point]
    launcher: dict[str, str]
    flags: list[str]
    upload_to: str | None
    devices: list[str] = field(default_factory=list)
    tokens: dict[str, int] = field(default_factory=dict)

    def directory(self, point: Point) -> Path:
        return self.run_dir / point.name

    def flags_of(self, point: Point) -> list[str]:
        own = [*point.flags, f"--run_dir={self.directory(point)}"]
        if self.upload_to is not None:
            own.append(f"--upload_to={self.upload_to.rstrip('/')}/{point.name}")
        return own


def run(arguments: argparse.Namespace) -> int:
    sweep, is_check = _read(arguments)
    if arguments.render is not None:
        arguments.settings, arguments.name = None, arguments.name or sweep.run_dir.name
        job = job_from(arguments, [*sweep.flags, f"--run_dir={sweep.run_dir}"])
        points = [sweep.flags_of(point) for point in sweep.points]
        job = replace(job, points=points, at_once=arguments.jobs)
        write_job(slurm_script(job), arguments.render, "--render")
        return EXIT_DONE
    code = EXIT_DONE
    if not arguments.table:
        jobs = arguments.jobs or 1
        _check(sweep, jobs)
        if is_check:
            print("\n".join(point.name for point in sweep.points))
            return EXIT_DONE
        code = _start(sweep, jobs, arguments.master_port)
    _show(sweep)
    return code


def _read(arguments: argparse.Namespace) -> tuple[Sweep, bool]:
    """Return the sweep described by the command line, and whether to only check it.

    Raises:
        ConfigError: lists every problem that can be found by reading only the --settings file.
    """
    problems: list[str] = []
    given, models = list(arguments.axes), arguments.model_config
    launcher, flags = split_flags(arguments.others)
    if len(models) == 1:
        flags.append(f"--model_config={models[0]}")
    elif models:
        given.append(f"model_config={','.join(models)}")
    axes = read_axes(given, problems)
    settings, found = parse_settings(flags, LAUNCHER_FLAGS)
    problems += found
    is_check = settings.check
    if not given:
        problems.append(f"{COMMAND_LINE}: --set: missing. For example, write --set seed=0,1.")
    if settings.run_dir is None:
        problems.append(f"{COMMAND_LINE}: --run_dir: missing. Give a directory for the sweep.")
    for axis in axes:
        if settings.origins.get(axis, "").startswith(COMMAND_LINE):
            problems.append(f"{COMMAND_LINE}: --{axis}: given in --set too. Remove one of them.")
    options = dict(flag[2:].partition("=")[::2] for flag in launcher)
    problems += [
        f"{COMMAND_LINE}: --{name}: a sweep starts its runs on this machine. Remove it, or write "
        f"an array job with --render."
        for name in PLACES
        if name in options
    ]
    if not options.get("num_gpus", "1").isdecimal():
        problems.append(f"{COMMAND_LINE}: --num_gpus: {options['num_gpus']} is not a number.")
    if problems:
        raise ConfigError(problems)
    flags = [flag for flag in flags if flag.replace("-", "_") != "__check"]
    run_dir, upload_to = Path(str(settings.run_dir)), settings.upload_to
    return Sweep(run_dir, grid(axes), options, flags, upload_to), is_check


# -------------------------------------------------------------------------------------------------
# Check every point, then run the points that are not done


def _check(sweep: Sweep, jobs: int) -> None:
    """Check every point as `zerolm train` does, before anything is written.

    Raises:
        ConfigError: lists every problem; one that does not affect all points names those affected.
    """
    from deepspeed.accelerator import get_accelerator

    from zerolm.preflight.check import check

    accelerator = get_accelerator()
    total = accelerator.device_count()
    if accelerator.device_name() != "cpu":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(total)))
        sweep.devices = visible.split(",")
    ranks = int(sweep.launcher.setdefault("num_gpus", str(max(1, total // jobs))))
    environment = {**os.environ, "WORLD_SIZE": str(ranks), "RANK": "0", "LOCAL_RANK": "0"}
    refused: dict[str, list[str]] = {}
    for point in sweep.points:
        try:
            plan = check([*sweep.flags, *sweep.flags_of(point)], environment)
            whole = plan.total_sequences * plan.settings.seq_len
            sweep.tokens[point.name] = min(whole, plan.settings.total_tokens)
        except ConfigError as error:
            for problem in error.problems:
                refused.setdefault(problem, []).append(point.name)
    if refused:
        raise ConfigError(
            problem if len(names) == len(sweep.points) else f"{'; '.join(names)}: {problem}"
            for problem, names in refused.items()
        )


@dataclass
class _Job:
    """A started run.

    Attributes:
        slot: index that determines the run's devices and port.
        since: start time, measured with `time.monotonic`.
        forwarded: number of signals forwarded to the run.
    """

    point: Point
    process: subprocess.Popen[bytes]
    slot: int
    since: float
    forwarded: int = 0


def _start(sweep: Sweep, jobs: int, master_port: int) -> int:
    """Run all points that are not done, and return the exit code of the sweep."""
    from launch.experiments.results import result_of

    waiting, failed, total = list(sweep.points), list[str](), len(sweep.points)
    running: list[_Job] = []
    signals: list[int] = []
    is_stopped = False
    handlers = {
        each: signal.signal(each, lambda number, frame: signals.append(number))
        for each in processes.stop_signals()
    }
    while running or (waiting and not signals):
        for job in list(running):
            while job.forwarded < len(signals):
                job.process.send_signal(signals[job.forwarded])
                job.forwarded += 1
            if (code := job.process.poll()) is None:
                continue
            running.remove(job)
            said = "done"
            if code == EXIT_STOPPED or (signals and code != EXIT_DONE):
                said, is_stopped = "stopped", True
            elif code != EXIT_DONE:
                said = f"exit code {code}, see {sweep.directory(job.point) / LOG}"
                failed.append(job.point.name)
            _log(job.point, f"{said} after {duration(time.monotonic() - job.since)}")
        if signals or not waiting or len(running) == jobs:
            time.sleep(POLL_SECONDS)
            continue
        point = waiting.pop(0)
        before = result_of(point, sweep.directory(point))
        if before.state == DONE and before.tokens >= sweep.tokens[point.name]:
            _log(point, "already done")
        elif before.state == GAVE_UP:
            _log(point, f"gave up earlier, see zerolm status {before.run_dir}")
            failed.append(point.name)
        else:
            slot = min(set(range(jobs)) - {job.slot for job in running})
            _log(point, f"starting, {total - len(waiting)} of {total}")
            running.append(_launch(sweep, point, slot, jobs, master_port))
    for each, handler in handlers.items():
        signal.signal(each, handler)
    for name in failed:
        print(f"sweep: failed: {name}", file=sys.stderr)
    if signals or (is_stopped and not failed):
        return EXIT_STOPPED
    return EXIT_BUG if failed else EXIT_DONE


def _launch(sweep: Sweep, point: Point, slot: int, jobs: int, master_port: int) -> _Job:
    """Start `zerolm train` for a point; the run saves and stops if the sweep is killed."""
    options, environment = dict(sweep.launcher), dict(os.environ)
    ranks = int(options["num_gpus"])
    if sweep.devices:  # the launcher uses all visible devices unless a flag limits them
        del options["num_gpus"]
        chosen = [
            sweep.devices[(slot * ranks + each) % len(sweep.devices)] for each in range(ranks)
        ]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)
    if jobs > 1:
        cores = len(os.sched_getaffinity(0))
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // (jobs * ranks))))
    options["master_port"] = str(machine.free_port(master_port + slot))
    words = [f"--{name}={value}" if value else f"--{name}" for name, value in options.items()]
    directory = sweep.directory(point)
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / LOG).open("ab") as log:
        process = subprocess.Popen(
            module_command("zerolm", "train", *words, *sweep.flags, *sweep.flags_of(point)),
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment,
            start_new_session=True, preexec_fn=partial(end_with_parent, signal.SIGTERM),
        )  # fmt: skip
    return _Job(point, process, slot, time.monotonic())


def _log(point: Point, message: str) -> None:
    print(f"sweep: {point.name}: {message}", flush=True)


# -------------------------------------------------------------------------------------------------
# Table and plot


def _show(sweep: Sweep) -> None:
    """Print the results and optima; also write them to sweep.json and plot them in sweep.png."""
    from launch.experiments import draw, results
    from zerolm.common.files import write_json

    rows = [results.result_of(point, sweep.directory(point)) for point in sweep.points]
    results.require_one_metric(rows)
    axis = results.curve_axis(rows)
    found = results.optima(rows, axis)
    print(f"\n{results.as_text(rows, axis, found)}")
    if not any(row.loss is not None for row in rows):
        return
    write_json(sweep.run_dir / "sweep.json", results.as_json(rows, axis, found))
    picture = draw.draw(rows, axis, found, sweep.run_dir / "sweep.png")
    print(f"\n{picture}", flush=True)
