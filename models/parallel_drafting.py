"""Draft models and heads that draft several tokens in one forward pass, from mask tokens that follow the known ones.

Draft models that were trained for this are called PARD (arXiv 2504.18583), EAGLE-3 heads P-EAGLE.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..callers.errors import ConfigError, short_repr

_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")  # of config.json, by who published the model


def mask_token(config: Mapping[str, Any], vocab_size: int) -> int:
    """Return the token that stands for each token to be drafted after the first.

    Raises:
        ConfigError: config.json names none, so that the model was not trained for this, or none of the vocabulary.
    """
    name = next((name for name in _KEYS if config.get(name) is not None), None)
    if name is None:
        reason = f"its config.json has none of {', '.join(_KEYS)}; leave parallel_drafting out, or give a model made for it"
        raise ConfigError(f"the model cannot draft in parallel: {reason}")
    token = config[name]
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
        raise ConfigError(f"config.json has {name}={short_repr(token)}, which is no token; the model has {vocab_size:,}")
    return token
