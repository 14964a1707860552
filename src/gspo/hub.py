"""The hub of models and data sets, asked once whether it answers: its client would go on trying for a minute, in lines of its own.

In: nothing. Out: why it is out of reach, or None. Whoever looks for a name there (`models`, `tasks`, `rewards`) asks first.
"""

from __future__ import annotations

import os
import sys
from functools import cache

SECONDS = 5.0
"""Time that it has to answer."""


def out_of_reach() -> str | None:
    """None if the hub answers; else a sentence, and from then on this process looks in the hub's cache alone."""
    from huggingface_hub import constants

    asked = _answer.cache_info().currsize > 0
    if constants.HF_HUB_OFFLINE and not (asked and _answer()):
        return "HF_HUB_OFFLINE is set, so only the hub's cache was looked into"
    return _answer()


@cache
def _answer() -> str | None:
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS)
    except Exception as error:  # of whichever library the client speaks through
        why = str(error) or type(error).__name__
    else:
        return None
    constants.HF_HUB_OFFLINE = True
    os.environ["HF_HUB_OFFLINE"] = "1"  # `datasets` reads it when it is imported
    if (datasets := sys.modules.get("datasets")) is not None:
        datasets.config.HF_HUB_OFFLINE = True
    return f"the hub ({constants.ENDPOINT}) does not answer ({why}), so only its cache was looked into"
