"""Why a reader's outcome is its own limit: {"reader family": reason, and how that is known}."""

LIMITS: dict[str, str] = {}
