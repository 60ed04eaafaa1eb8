"""W&B's environment variables: which of them name the run, and which have no effect on it.

W&B itself reads all other variables. Imports W&B only to check variables that are set.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from zerolm.common.errors import RecordError
from zerolm.common.secrets import masked
from zerolm.config.settings import Settings
from zerolm.parts.inheritance import derived_names
from zerolm.run_dir.records import find_run_json
from zerolm.tracking.wandb_identity import MAX_NAME_CHARACTERS, MAX_TAG_CHARACTERS, split_tags

PREFIX = "WANDB_"
NAMES = {  # {setting: variables that W&B reads for it; the first is the documented one}
    "wandb_project": ("WANDB_PROJECT",),
    "wandb_entity": ("WANDB_ENTITY",),
    "wandb_group": ("WANDB_RUN_GROUP",),
    "wandb_name": ("WANDB_NAME", "WANDB_RUN_NAME"),
    "wandb_tags": ("WANDB_TAGS", "WANDB_RUN_TAGS"),
}
_OWN_RUN = "each start continues the W&B run of its run directory"
_SWEEP = "the run is not attached to W&B's sweep or launch job, whose agent may still pass flags"
_FINISH = "zerolm gives W&B a limited time to finish"
REPLACED = {  # {variable: why it has no effect}; removed before W&B starts, since some would fail
    "WANDB_RUN_ID": _OWN_RUN,
    "WANDB_RESUME": _OWN_RUN,
    "WANDB_RESUME_FROM": _OWN_RUN,
    "WANDB_FORK_FROM": _OWN_RUN,
    "WANDB_RESUMED": _OWN_RUN,
    "WANDB_REINIT": _OWN_RUN,
    "WANDB_DIR": "W&B's files are in the run directory",
    "WANDB_ROOT_DIR": "W&B's files are in the run directory",
    "WANDB_CONSOLE": "the run's output is in rank0.log",
    "WANDB_FINISH_TIMEOUT": _FINISH,
    "WANDB_FINISH_TIMEOUT_RAISES": _FINISH,
    "WANDB__STATS_PID": "system metrics are those of the run's first rank",
    "WANDB_SERVICE": "zerolm starts W&B's service itself",
    "WANDB_SWEEP_ID": _SWEEP,
    "WANDB_SWEEP_PARAM_PATH": _SWEEP,
    "WANDB_LAUNCH": _SWEEP,
    "WANDB_LAUNCH_CONFIG_PATH": _SWEEP,
    "WANDB_CONFIG": _SWEEP,
    "WANDB_ARTIFACTS": _SWEEP,
}
OTHERS = {  # read by W&B 0.31 and no field of its settings
    *("WANDB_ARTIFACT_DIR", "WANDB_ARTIFACT_FETCH_FILE_URL_BATCH_SIZE", "WANDB_CACHE_DIR"),
    *("WANDB_CONFIG_DIR", "WANDB_CORE_DEBUG", "WANDB_DATA_DIR", "WANDB_DEBUG"),
    *("WANDB_ENABLE_DCGM_PROFILING", "WANDB_ERROR_REPORTING", "WANDB_X_EXECUTABLE"),
}
RENAMED = {  # {variable of another program: what has its effect here}
    "WANDB_DISABLED": "WANDB_MODE=disabled turns W&B off",
    "WANDB_GROUP": "W&B's name is WANDB_RUN_GROUP",
    "WANDB_DESCRIPTION": "W&B's name is WANDB_NOTES",
}
INVALID_CHARACTERS = "/\\#?%:"  # wandb/sdk/wandb_settings.py, validate_project
MAX_JOB_TYPE_CHARACTERS = 64  # refused by W&B's server: github.com/wandb/wandb/issues/6402


def with_environment(settings: Settings, environment: Mapping[str, str]) -> Settings:
    """Return the settings with W&B's names from the environment, or else from the resumed run.

    Flags, settings files and a DeepSpeed JSON take precedence over the environment, which takes
    precedence over the trunk of a branch.
    """
    chosen: dict[str, Any] = {}
    origins: dict[str, str] = {}
    recorded = _recorded(settings)
    for name, variables in NAMES.items():
        if name in settings.explicit - settings.inherited:
            continue
        if found := next((each for each in variables if environment.get(each)), None):
            chosen[name], origins[name] = environment[found], f"environment: {found}"
        elif name in recorded and name not in settings.explicit:
            chosen[name], origins[name] = recorded[name], f"{settings.run_dir}: settings.{name}"
    return dataclasses.replace(
        settings,
        explicit=settings.explicit | chosen.keys(),
        inherited=settings.inherited - chosen.keys(),
        origins=settings.origins | origins,
        **chosen,
    )


def _recorded(settings: Settings) -> dict[str, str]:
    """Return W&B's names that were chosen for the run which is resumed."""
    try:
        record = find_run_json(settings.run_dir) if settings.run_dir else None
    except RecordError:  # reported by a later check
        return {}
    return chosen_names(record) if record else {}


def chosen_names(record: Mapping[str, Any]) -> dict[str, str]:
    """Return {setting: value} for W&B's names in run.json that are not defaults."""
    settings, derived = record.get("settings", {}), derived_names(record)
    return {name: settings[name] for name in NAMES if settings.get(name) and name not in derived}


def name_problems(given: Mapping[str, tuple[str, str]]) -> list[str]:
    """Return the names that W&B refuses.

    Args:
        given: {setting: (start of the message, value)}.
    """
    problems = []
    for name, (where, value) in given.items():
        rest = f"{where}: {value[:40]}{'...' * (len(value) > 40)}: W&B refuses"
        invalid = sorted({each for each in value if each in INVALID_CHARACTERS})
        if name in ("wandb_project", "wandb_entity") and invalid:
            both = "--wandb_entity TEAM --wandb_project PROJECT name both"
            fix = both if "/" in value else "Use letters, digits, - and _"
            problems.append(f"{rest} {' '.join(invalid)} in a name. {fix}.")
        parts, most = [value], MAX_NAME_CHARACTERS
        if name == "wandb_tags":
            parts, most = split_tags(value), MAX_TAG_CHARACTERS
        if longest := max((len(part) for part in parts if len(part) > most), default=0):
            problems.append(f"{rest} more than {most} characters, got {longest}. Shorten it.")
    return problems


def problems(settings: Settings, environment: Mapping[str, str], mode: str) -> list[str]:
    """Return the names and variables with which W&B would not start, or its server not accept the
    run.
    """
    given = {
        name: (settings.where(name), getattr(settings, name))
        for name in NAMES
        if getattr(settings, name) and name in settings.explicit
    }
    return name_problems(given) + variable_problems(environment, mode)


def variable_problems(environment: Mapping[str, str], mode: str) -> list[str]:
    """Return the variables whose values W&B refuses; it would refuse them after the run started."""
    found = []
    names = {variable for variables in NAMES.values() for variable in variables}
    for variable in _set(environment, but=names | REPLACED.keys()):
        import wandb

        value, problem = environment[variable], ""
        try:
            wandb.Settings(mode=mode).update_from_env_vars({variable: value})  # type: ignore[arg-type]
        except Exception as error:  # pydantic's, W&B's and those of its parsers
            details = getattr(error, "errors", None)
            problem = str(details()[0]["msg"] if callable(details) else error)
        if variable.endswith("JOB_TYPE") and len(value) > MAX_JOB_TYPE_CHARACTERS:
            problem = f"more than {MAX_JOB_TYPE_CHARACTERS} characters"
        if problem:
            line = masked(" ".join(problem.split())).rstrip(".")
            found.append(f"environment: {variable}: W&B refuses it: {line}. Correct or unset it.")
    return found


def notices(
    environment: Mapping[str, str], used: Mapping[str, tuple[str, str | None]], mode: str
) -> list[str]:
    """Return a line for each of W&B's variables that does not do what it says.

    Args:
        used: {setting: (where it was given, value)}.
        mode: the resolved mode.
    """
    lines = []
    for name, (where, value) in used.items():
        for variable in _set(environment, only=NAMES[name]):
            if environment[variable] != value:
                lines.append(f"{variable} has no effect: {where} is {value}")
    for variable in _set(environment, but={each for all_ in NAMES.values() for each in all_}):
        if variable == "WANDB_MODE":
            given = {"dryrun": "offline", "run": "online"}.get(environment[variable].strip())
            if mode != (given or environment[variable].strip()):
                lines.append(f"{variable} has no effect: W&B is {mode}")
        elif variable in REPLACED:
            lines.append(f"{variable} has no effect: {REPLACED[variable]}")
        elif variable not in OTHERS and not _is_setting(variable):
            hint = RENAMED.get(variable, "W&B has no such variable")
            lines.append(f"{variable} has no effect: {hint}")
    return [f"environment: {line}" for line in lines]


def _set(
    environment: Mapping[str, str], *, but: Iterable[str] = (), only: Iterable[str] | None = None
) -> list[str]:
    names = (name for name in sorted(environment) if name.startswith(PREFIX) and environment[name])
    return [name for name in names if name not in but and (only is None or name in only)]


def _is_setting(variable: str) -> bool:
    """Return whether W&B's settings have a field that the variable sets."""
    import wandb

    class Fields(wandb.Settings):
        def __setattr__(self, name: str, value: Any) -> None:
            changed.append(name)

    changed: list[str] = []
    fields = Fields()
    changed.clear()
    fields.update_from_env_vars({variable: "1"})
    return bool(changed)
