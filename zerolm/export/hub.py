"""Pushes an exported model to the Hugging Face hub, private by default.

`check` runs before the export, so a missing token is found before hours of work. The token comes
from `hf auth login` or HF_TOKEN; there is no flag for it.
"""

from pathlib import Path

from zerolm.common.errors import ConfigError, ZerolmError, reason


class PushError(ZerolmError):
    """The push failed; the exported model on disk is complete."""


def check(repository: str, public: bool) -> None:
    """Check that a model can be pushed under this name.

    Raises:
        ConfigError: the model cannot be pushed; the message states the fix.
    """
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
    from huggingface_hub.utils import validate_repo_id

    where = f"--push {repository}"
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ConfigError(f"{where}: {error} Write user/name.") from None
    if constants.is_offline_mode():
        raise ConfigError(f"{where}: HF_HUB_OFFLINE is set. Unset it, or leave --push out.")
    if not get_token():
        raise ConfigError(f"{where}: no token found. Run `hf auth login`, or set HF_TOKEN.")
    try:
        found = HfApi().model_info(repository)
    except RepositoryNotFoundError:
        return
    except (HfHubHTTPError, OSError) as error:
        raise ConfigError(
            f"{where}: the hub returned an error: {reason(error, named=False)}. Try again later."
        ) from None
    if not found.private and not public:
        raise ConfigError(
            f"{where}: this repository is already public. Add --public if the model may be public, "
            f"or choose another name."
        )


def push(directory: Path, repository: str, public: bool) -> str:
    """Upload a model directory; return its URL.

    Raises:
        PushError: the upload failed.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        url = api.create_repo(repository, private=not public, exist_ok=True)
        api.upload_folder(
            repo_id=repository, folder_path=directory, commit_message=f"Upload {directory.name}"
        )
    except Exception as error:  # the hub's library also raises errors from several other libraries
        raise PushError(
            f"--push {repository}: {reason(error, named=False)}. {directory} is complete: push it "
            f"with `hf upload {repository} {directory}`."
        ) from error
    return str(url)
