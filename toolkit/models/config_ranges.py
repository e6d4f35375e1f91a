"""Numbers of a config.json that transformers accepts and a forward does not."""

import math
import re
from pathlib import Path
from typing import Any

from toolkit.errors import ModelError
from toolkit.formats import nested_items

_PROBABILITY = re.compile(r"dropout(_prob|_rate|_p)?$|_pdrop$|layer_?drop$|drop_path_rate$")
_POSITIVE = re.compile(r"^rope_theta$")
_EPSILON = re.compile(r"norm_eps(ilon)?$")
_SIZES = re.compile(r"^(num_\w*(heads|layers|experts)|hidden_size|head_dim|vocab_size)$")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def check_ranges(content: dict[str, Any], file: Path) -> None:
    """Refuse a config.json with a number that no forward can use. Raises a ModelError that names
    the setting, before anything is built.
    """
    for name, value in nested_items(content):
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        expected = ""
        if _PROBABILITY.search(name) and not 0 <= value <= 1:
            expected = "a probability from 0 to 1"
        elif _POSITIVE.search(name) and not (value > 0 and math.isfinite(value)):
            expected = "a number above 0"
        elif _EPSILON.search(name) and not (value >= 0 and math.isfinite(value)):
            expected = "0 or more"
        elif _SIZES.search(name) and value < 0:
            expected = "no negative number"
        if expected:
            raise ModelError(f"{file}: {name} is {value}, expected {expected}. Correct it there")
    for section in (content, *(v for v in content.values() if isinstance(v, dict))):
        chosen = [section[name] for name in _CHOSEN if isinstance(section.get(name), int)]
        experts = [section[name] for name in _EXPERTS if isinstance(section.get(name), int)]
        if chosen and experts and max(chosen) > max(experts) > 0:
            raise ModelError(
                f"{file}: {max(chosen)} experts are chosen for a token, of {max(experts)}. Correct "
                "one of the two there"
            )
