"""Checkpoints on the Hugging Face hub."""

from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from gptile.model.tokenizer import (
    ADDED_TOKENS_FILE,
    MERGES_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    VOCAB_FILE,
)
from gptile.weights.errors import CheckpointError
from gptile.weights.files import shard_names
from gptile.weights.names import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    INDEX_FILE,
    PICKLE_FILE,
    WEIGHTS_FILE,
)


def fetch(repo: str, revision: str | None) -> Path:
    """The directory in the hub's cache that holds a checkpoint, downloaded where it is not there.

    Only the files needed are fetched. The hub's own environment variables apply: HF_HOME, HF_TOKEN,
    HF_HUB_OFFLINE, HF_ENDPOINT. Where the hub cannot be reached the cache has to do.

    Raises:
        CheckpointError: saying what is missing or refused.
    """
    where = f"{repo} on the hub" + (f" at {revision}" if revision else "")
    try:
        listing = HfApi().model_info(repo, revision=revision)
        present = {file.rfilename for file in listing.siblings or ()}

        def download(name: str) -> Path:
            return Path(hf_hub_download(repo, name, revision=listing.sha))

        if CONFIG_FILE not in present:
            raise CheckpointError(f"{where}: no {CONFIG_FILE}, so not a model of transformers")
        # Asked for by the name of its revision, so that the cache knows that name when offline.
        hf_hub_download(repo, CONFIG_FILE, revision=revision)
        directory = download(CONFIG_FILE).parent
        if WEIGHTS_FILE in present:
            weights = [WEIGHTS_FILE]
        elif INDEX_FILE in present:
            weights = shard_names(download(INDEX_FILE))
        else:
            raise CheckpointError(
                f"{where}: no {WEIGHTS_FILE}; download its {PICKLE_FILE} and run `gptile convert`"
            )
        vocabulary = {VOCAB_FILE, MERGES_FILE}
        tokenizer = vocabulary if vocabulary <= present else {TOKENIZER_FILE}
        tokenizer |= {TOKENIZER_CONFIG_FILE, ADDED_TOKENS_FILE}
        optional = {GENERATION_CONFIG_FILE, *tokenizer} & present
        for name in (*sorted(optional), *weights):
            download(name)
    except CheckpointError:
        raise
    except GatedRepoError:
        raise CheckpointError(f"{where}: access is gated; accept its terms, set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"{repo}: neither a local path nor a model on the hub (private ones need HF_TOKEN)"
        ) from None
    except RevisionNotFoundError:
        raise CheckpointError(f"{where}: no such revision") from None
    except EntryNotFoundError as error:
        raise CheckpointError(f"{where}: a file is missing ({_first_line(error)})") from None
    except (HTTPError, OfflineModeIsEnabled) as error:
        return _in_cache(repo, revision, _first_line(error))
    except ValueError as error:  # of the id itself, or of HF_ENDPOINT, HF_TOKEN
        raise CheckpointError(f"{where}: cannot be asked for ({_first_line(error)})") from None
    return directory


def _in_cache(repo: str, revision: str | None, why: str) -> Path:
    try:
        config = hf_hub_download(repo, CONFIG_FILE, revision=revision, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        raise CheckpointError(
            f"{repo}: not a local path, not in the hub cache, and the hub cannot be reached "
            f"({why}); check the name and the network, or pass a local directory"
        ) from None
    return Path(config).parent


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
