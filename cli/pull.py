"""`sensorium pull`: download a model from the Hugging Face Hub into its cache."""

from __future__ import annotations

import argparse

from ..callers.errors import ConfigError, HubError, short_repr
from ..callers.wording import worded
from .common import add_revision

EXAMPLE = "sensorium pull Qwen/Qwen2.5-VL-3B-Instruct"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help_text = "the model's name on the Hub; a complete download is updated to the newest commit of the branch"
    parser.add_argument("name", metavar="ORG/NAME", help=help_text)
    add_revision(parser)


def run(args: argparse.Namespace) -> int:
    """Print the folder of the downloaded snapshot."""
    from ..engine.config import make_config
    from ..engine.setup.hub import check_architecture, find_folder, find_model
    from ..engine.setup.hub_cache import is_name

    if not is_name(args.name):
        reason = f"{short_repr(args.name)} is not the name of a model on the Hub"
        raise ConfigError(f"{reason}; give ORG/NAME, as in Qwen/Qwen2.5-VL-3B-Instruct", param="name")
    try:
        folder = find_folder(args.name, args.revision, update=True, check=check_architecture)
    except HubError as error:
        raise with_offline_advice(error, args) if error.info.code == "unreachable" else error from None
    find_model(make_config(str(folder), {}))  # also downloads an adapter's base model and parts in other repositories
    print(folder)
    return 0


def with_offline_advice(error: HubError, args: argparse.Namespace) -> HubError:
    """Return the error for an unreachable Hub, with advice that needs no network."""
    from ..engine.setup.hub_cache import MAIN, CachedModel

    cached = CachedModel(args.name)
    commit = cached.commit(args.revision or MAIN)
    if commit is not None and cached.is_complete(commit):
        how = "To update it, check the network, HF_ENDPOINT, proxies and HF_HUB_OFFLINE"
        return HubError(f"{error.info.value}; other commands use the cached commit {commit} of {args.name}. {how}")
    how = f"copy the folder of {args.name} from another machine, and give its path as --model to other commands"
    return HubError(worded(error.info.text, {"give_folder": how}))
