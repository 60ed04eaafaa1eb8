"""What `--check` refuses of a model and its features, of a profile without keys on one rank."""

from typing import Any

from zerolm import features
from zerolm.distributed.layout import Layout
from zerolm.ds_config.profile import Profile
from zerolm.features.feature import Case
from zerolm.preflight.model_rules import model_problems


def problems_of(settings: Any, config: Any, device: str = "absent") -> list[str]:
    case = Case(settings, config, Profile.parse({}), Layout(1), device)
    return [*model_problems(settings, config, device), *features.problems(case)]
