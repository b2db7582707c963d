"""Draft models and heads that draft several tokens in one forward pass, from mask tokens that follow the known tokens.

Draft models that were trained for this are called PARD (arXiv 2504.18583), and EAGLE-3 heads P-EAGLE.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..callers.errors import ConfigError, short_repr

_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")  # of config.json; publishers differ


def mask_token(config: Mapping[str, Any], vocab_size: int) -> int:
    """Return the token that stands for each token to be drafted after the first.

    Raises:
        ConfigError: config.json names no mask token (the model was not trained for this), or one outside of the vocabulary.
    """
    name = next((name for name in _KEYS if config.get(name) is not None), None)
    if name is None:
        reason = f"its config.json has none of {', '.join(_KEYS)}; leave parallel_drafting out, or give a model made for it"
        raise ConfigError(f"the model cannot draft in parallel: {reason}")
    token = config[name]
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
        raise ConfigError(f"config.json has {name}={short_repr(token)}, which must be an id from 0 to {vocab_size - 1}")
    return token
