"""Try on a tiny copy whether ranks can share the rows of a model type (context parallelism).

They can if only the attention function lets a token see other tokens. There is no list of types. A
copy runs with an attention function that mixes nothing: the logits of a row must then be those of
its parts. Convolutions, recurrences, attention elsewhere, and positions whose encoding depends on
the longest position of a call make a difference.
"""

import copy
import functools
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from toolkit.errors import ModelError
from toolkit.formats import assets_of
from toolkit.models.classes import causal_lm_class, model_class_name
from toolkit.models.modes import forked_rng
from toolkit.models.packing_probe import compute_token_logits
from toolkit.models.tiny_copy import (
    SPECIAL,
    VOCABULARY,
    build_noisy_copy,
    try_tiny_copies,
)

_MIXES_NOTHING = "context_probe"
_PART = 4  # a copy's `longrope` changes its factors beyond 4 tokens
_LENGTH = 3 * _PART
_ROUNDING = 1e-4  # share of the logits' spread
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
_LONGEST = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
_obstacles: dict[tuple[Any, ...], str] = {}


def check_context_parallel(model: PreTrainedModel, parts: int, sequence_length: int) -> None:
    """Raise an error if ranks cannot share the rows of a model.

    Takes about a second, and nothing the second time. Not collective.

    Args:
        model: the model, on meta or not, without adapters.
        parts: number of ranks that share each row; 1: nothing is checked.
        sequence_length: maximum number of tokens of a row.

    Raises:
        ModelError: the ranks do not divide the attention heads, the attention is not SDPA, or a
            layer sees other tokens outside of the attention function. The message says which.
    """
    if parts == 1:
        return
    config = model.config
    key = (model_class_name(model), config.to_json_string(use_diff=False), parts, sequence_length)
    if key not in _obstacles:
        model_class = assets_of(model).model_class or causal_lm_class(config)
        _obstacles[key] = find_context_obstacle(config, model_class, parts, sequence_length)
    if _obstacles[key]:
        raise ModelError(
            f"sharding.context_parallel {parts} is not possible for {model_class_name(model)}: "
            f"{_obstacles[key]}; set it to 1"
        )


def find_context_obstacle(
    config: PreTrainedConfig, model_class: Any, parts: int, length: int
) -> str:
    """Return why ranks cannot share rows; "" if they can. See `check_context_parallel`."""
    kernels = {str(c._attn_implementation) for c in (config, config.get_text_config())}
    if kernels != {"sdpa"}:
        return (
            f"its attention is {' and '.join(sorted(kernels))}, and rows are divided with sdpa "
            "only (model.attn_implementation)"
        )
    counts = vars(config.get_text_config())
    for name in _HEADS:
        heads = counts.get(name)
        numbers = heads if isinstance(heads, list) else [heads]
        if any(isinstance(number, int) and number % parts for number in numbers):
            return f"{parts} ranks do not divide its attention heads ({name} {heads})"

    def compare(small: PreTrainedConfig) -> str:
        return _compare_parts(model_class, small, _probe_positions(config, small, length))

    fault, failure = try_tiny_copies(config, model_class, length, compare)
    return failure if fault is None else fault


def _probe_positions(full: Any, small: Any, length: int) -> torch.Tensor:
    """Build the positions of a row: the first tokens, then positions up to the longest possible.

    The copy may have fewer positions than the model. The positions reach beyond those of the copy
    if and only if the rows of the run reach beyond those of the model.

    Returns:
        int64 [1, _LENGTH].
    """
    lengths = [
        next((n for name in _LONGEST if isinstance(n := vars(c).get(name), int)), None)
        for c in (full.get_text_config(), small.get_text_config())
    ]
    longest = length
    if lengths[0] and lengths[1]:
        longest = -(-length * lengths[1] // lengths[0])
    later = torch.linspace(_PART, max(_LENGTH, longest) - 1, _LENGTH - _PART).round().long()
    if longest < _LENGTH:
        later = torch.arange(_PART, _LENGTH)
    return torch.cat([torch.arange(_PART), later])[None]


def _mix_nothing(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """Return each token's own value, in the interface of an attention function."""
    out = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    # Queries and keys take part, so that their positions matter.
    scores = (
        torch.stack([query.float(), _pad_heads(key, query).float()]).mul(8).cos().sum(0).mean(-1)
    )
    return (out * (1 + scores[..., None]).to(out.dtype)).transpose(1, 2).contiguous(), None


def _pad_heads(key: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Repeat key heads until there are as many as query heads."""
    return key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)


@torch.no_grad()
def _compare_parts(model_class: Any, config: PreTrainedConfig, positions: torch.Tensor) -> str:
    """Compare a row with its parts in a copy whose attention mixes nothing.

    Args:
        model_class: class of the copy.
        config: its config.
        positions: [1, T].

    Returns:
        What is wrong; "" if the parts have the logits of the row.
    """
    config = copy.deepcopy(config)
    AttentionInterface.register(_MIXES_NOTHING, _mix_nothing)
    device = torch.device("cpu")
    with forked_rng(), torch.compiler.set_stance("force_eager"):
        model = build_noisy_copy(model_class, config, device)
        for module in model.modules():
            if isinstance(settings := getattr(module, "config", None), PreTrainedConfig):
                settings._attn_implementation = _MIXES_NOTHING
        torch.manual_seed(1)
        ids = torch.randint(SPECIAL, VOCABULARY, positions.shape)
        run = functools.partial(_compute_logits, model)

        def cut_and_run(at: torch.Tensor) -> torch.Tensor:
            pairs = zip(ids.split(_PART, 1), at.split(_PART, 1), strict=True)
            return torch.cat([run(*pair) for pair in pairs], dim=1)

        # Parts run first, because some positions remember the longest row.
        parts = cut_and_run(positions)
        whole = run(ids, positions)
        near = torch.zeros_like(positions)
        same_position = run(ids, near), cut_and_run(near)
    spread = float(whole.std()) or 1.0
    if not whole.isfinite().all() or not parts.isfinite().all():
        return "the logits of a tiny copy are not finite"
    off = float((whole - parts).abs().max()) / spread
    if off <= _ROUNDING:
        return ""
    whole, parts = same_position
    if float((whole - parts).abs().max()) / spread <= _ROUNDING:
        return (
            "the encoding of its positions depends on the longest position of a forward, as "
            f"longrope and dynamic do for rows of this length (logits differ by {off:.1e} of their "
            "spread)"
        )
    return (
        "its layers see other tokens outside of the attention function, as convolutions, "
        f"recurrences and eager attention do (logits differ by {off:.1e} of their spread)"
    )


def _compute_logits(
    model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Compute the logits of tokens at explicit positions; fp32 [B, T, vocabulary].

    For a reward model, these are the outputs of its head for each token.
    """
    return compute_token_logits(model, ids, position_ids=positions, use_cache=False).float()
