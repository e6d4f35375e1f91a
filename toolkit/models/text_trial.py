"""Whether a class can be trained on text alone, found out by trying it on a tiny copy."""

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from toolkit.errors import one_line
from toolkit.models.modes import forked_rng
from toolkit.models.tiny_copy import SPECIAL, VOCABULARY, cuts, drawn_copy, layer_kinds, on_meta

_MOST_PARAMETERS = 2**28
_CAUSAL = 1e-3  # of the spread of the logits: how far a later token may move them
_known: dict[tuple[type, str], str] = {}


def text_fault(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> str:
    """Return why `model_class` cannot be trained on text alone, in its own words; empty: it can, or
    no tiny copy of it could be made to try. Takes a second, once a process.
    """
    key = (model_class, config.to_json_string(use_diff=False))
    if key not in _known:
        _known[key] = _tried(model_class, config)
    return _known[key]


def _tried(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> str:
    fault = ""
    try:
        kinds = layer_kinds(on_meta(model_class, config))
    except Exception as error:  # the code of any model
        return one_line(error, 200)
    for small in cuts(config, kinds, None):
        try:
            size = sum(p.numel() for p in on_meta(model_class, small).parameters())
        except Exception:  # a cut that this config does not bear: a milder one is tried
            continue
        if size > _MOST_PARAMETERS:
            continue
        try:
            return _judged(drawn_copy(model_class, small, torch.device("cpu")).train())
        except Exception as error:  # the code of any model
            fault = one_line(error, 200)
    return fault


@torch.no_grad()
def _judged(model: PreTrainedModel) -> str:
    with forked_rng(), torch.compiler.set_stance("force_eager"):
        torch.manual_seed(0)
        ids = torch.randint(SPECIAL, VOCABULARY, (2, 8))
        other = ids.clone()
        other[:, -1] = SPECIAL + (ids[:, -1] - SPECIAL + 17) % (VOCABULARY - SPECIAL)
        answers = []
        for tokens in (ids, other):
            torch.manual_seed(1)  # dropout
            answers.append(model(input_ids=tokens, use_cache=False).logits.float())
    logits, moved = answers
    if logits.shape[:2] != ids.shape:
        return f"answers {list(logits.shape)} to tokens {list(ids.shape)}"
    off = float((moved - logits)[:, :-1].abs().max() / logits.std().clamp_min(1e-9))
    return "" if off <= _CAUSAL else "lets a token of a text see later ones"
