"""An exported model goes to the Hugging Face hub, private unless it is said otherwise.

Looked at before the export begins, so that hours of work do not end at a missing token. The token
is the one that the hub's library finds (`hf auth login` or HF_TOKEN); it is never a flag.
"""

from pathlib import Path

from zerolm.common.errors import ConfigError, ZerolmError


class PushError(ZerolmError):
    """The hub did not take the model; what was exported is whole on disk."""


def check(repository: str, public: bool) -> None:
    """See whether the hub will take a model under this name.

    Raises:
        ConfigError: what is in the way, with the fix.
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
        raise ConfigError(f"{where}: there is no token. Run `hf auth login`, or set HF_TOKEN.")
    try:
        found = HfApi().model_info(repository)
    except RepositoryNotFoundError:
        return
    except (HfHubHTTPError, OSError) as error:
        raise ConfigError(f"{where}: the hub says: {_one_line(error)}. Try again later.") from None
    if not found.private and not public:
        raise ConfigError(
            f"{where}: that repository is public already. Add --public if the model may be seen by "
            f"everybody, or choose another name."
        )


def push(directory: Path, repository: str, public: bool) -> str:
    """Send a model directory; return its address.

    Raises:
        PushError: the hub did not take all of it.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        url = api.create_repo(repository, private=not public, exist_ok=True)
        api.upload_folder(
            repo_id=repository, folder_path=directory, commit_message=f"Upload {directory.name}"
        )
    except Exception as error:  # of many libraries, below the hub's own
        raise PushError(
            f"--push {repository}: {_one_line(error)}. {directory} is whole: send it with "
            f"`hf upload {repository} {directory}`."
        ) from error
    return str(url)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or repr(error)
