"""Warn of special tokens in the data whose embedding rows are untrained and stay frozen.

[Note: untrained rows] Base models reserve rows for the special tokens of their instruct version,
and leave these rows at zero, at a tiny constant, or all equal. With adapters the embedding is
frozen. Then the model cannot distinguish such tokens, and cannot learn to write them.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from toolkit import ranks
from toolkit.data.feed.feed import Feed
from toolkit.data.feed.prepared import PreparedFeed
from toolkit.formats import local_slices, local_tensor
from toolkit.formats.layout import is_sharded_by_rows
from toolkit.models.peft_model import base_of, has_adapters

_MAX_EXAMPLES = 64  # that are searched for special tokens, for each source
# Rows are compared with those of so many added tokens, and so many at the end of the vocabulary.
_MAX_COMPARED = 512
_SAMPLED_ROWS = 256  # of each rank, for the median norm
_TINY_SHARE = 1e-3  # of the median norm
_MAX_LISTED = 8


class _Row(NamedTuple):
    """Properties of one row of an embedding or an output head."""

    norm: float
    is_constant: bool
    digest: str


def describe_untrained_tokens(
    model: nn.Module, feed: Feed, tokenizer: Tokenizer | None
) -> list[str]:
    """Warn about special tokens of the data that a frozen embedding or head has not learned.

    Collective. A token counts as not learned if its row of the matrix looks untrained; see [Note:
    untrained rows]. Reads a few hundred rows, and exchanges their properties.

    Args:
        model: the loaded, sharded model.
        feed: the data.
        tokenizer: the tokenizer; None: no tokens are checked.

    Returns:
        A list with one warning for the log, or an empty list.
    """
    if tokenizer is None or not (tokens := _used_special_tokens(feed, tokenizer)):
        return []
    added = sorted(map(int, tokenizer.added_tokens_decoder))[:_MAX_COMPARED]
    untrained: dict[str, list[int]] = {}
    for name, module in _find_frozen_embeddings(model).items():
        rows = len(module.weight)
        compared = {*added, *range(max(0, rows - _MAX_COMPARED), rows)}
        stats, median_norm = _measure_rows(module.weight, sorted({*tokens, *compared}))
        if untrained_tokens := [
            token for token in tokens if _is_untrained(token, stats, median_norm)
        ]:
            untrained[name] = untrained_tokens
    if not untrained:
        return []
    names = tokenizer.convert_ids_to_tokens
    untrained_tokens = sorted(set().union(*untrained.values()))
    listed_tokens = ", ".join(
        f"{names(token)} ({token})" for token in untrained_tokens[:_MAX_LISTED]
    )
    more = (
        f" and {len(untrained_tokens) - _MAX_LISTED} more"
        if len(untrained_tokens) > _MAX_LISTED
        else ""
    )
    leaves = ", ".join(name.rpartition(".")[2] for name in untrained)
    remedy = (
        f"Set lora.modules_to_save: [{leaves}]"
        if has_adapters(model)
        else f"Take {leaves} out of model.frozen_parameters"
    )
    return [
        f"WARNING    {listed_tokens}{more}: special tokens of the data whose rows in {leaves} look "
        "untrained (zero, constant, or equal to those of other tokens) and are frozen: the model "
        f"cannot learn them. {remedy}, or start from a model that knows the chat template"
    ]


def _used_special_tokens(feed: Feed, tokenizer: Tokenizer) -> list[int]:
    """List the ids of added tokens that occur in the first 64 examples of each source.

    Examples of streamed training data are not read yet. Instead, the added tokens of the chat
    template count.
    """
    added = {int(i): str(token) for i, token in tokenizer.added_tokens_decoder.items()}
    prepared = feed.sources if isinstance(feed, PreparedFeed) else ()
    used: set[int] = set()
    for source in (*prepared, *feed.eval_sources):
        used |= {i for ids in source.tokens[:_MAX_EXAMPLES]["input_ids"] for i in ids}
    if not prepared:
        text = str(tokenizer.chat_template or "")
        used |= {i for i, content in added.items() if content in text}
    return sorted(used & added.keys())


def _find_frozen_embeddings(model: nn.Module) -> dict[str, Any]:
    """Return by module name those of the input embedding and the output head that are frozen.

    Quantised modules, and modules that are sharded by columns, are skipped. Tied modules are
    included once.
    """
    base: Any = base_of(model)
    ends: dict[str, Any] = {}
    names = {id(module): name for name, module in base.named_modules()}
    for module in (base.get_input_embeddings(), base.get_output_embeddings()):
        weight = getattr(module, "weight", None)
        if module is None or weight is None or weight.dim() != 2:
            continue
        if any(p.requires_grad for p in module.parameters()) or not weight.is_floating_point():
            continue
        if is_sharded_by_rows(weight) and not any(
            weight is other.weight for other in ends.values()
        ):
            ends[names.get(id(module), type(module).__name__)] = module
    return ends


def _measure_rows(weight: torch.Tensor, tokens: list[int]) -> tuple[dict[int, _Row], float]:
    """Measure the rows of some tokens, and the median norm of a sample of all rows. Collective.

    Args:
        weight: [vocabulary, width], sharded or not.
        tokens: ids of the tokens.

    Returns:
        Token id -> properties of its row; and the median norm, 0 if there are no rows.
    """
    row_range = local_slices(weight)[0] if isinstance(weight, DTensor) else slice(0, len(weight))
    local = local_tensor(weight).detach()
    mine = [token for token in tokens if row_range.start <= token < row_range.stop]
    rows = _rows_to_cpu(local, (token - row_range.start for token in mine))
    step = max(1, len(local) // _SAMPLED_ROWS)
    norms = _rows_to_cpu(local, range(0, len(local), step)).norm(dim=1).tolist()
    facts = {
        token: _Row(
            float(row.norm()),
            bool(row.max() == row.min()),
            xxhash.xxh3_128_hexdigest(row.numpy().tobytes()),
        )
        for token, row in zip(mine, rows, strict=True)
    }
    merged, median_norm = dict[int, _Row](), list[float]()
    for part, sampled in ranks.gather((facts, norms)):
        merged |= part
        median_norm += sampled
    return merged, sorted(median_norm)[len(median_norm) // 2] if median_norm else 0.0


def _rows_to_cpu(local: torch.Tensor, places: Iterable[int]) -> torch.Tensor:
    """Copy the rows of `local` with the indices `places` to the CPU, as fp32."""
    index = torch.tensor([*places], dtype=torch.int64, device=local.device)
    return local.index_select(0, index).float().cpu()


def _is_untrained(token: int, rows: dict[int, _Row], median_norm: float) -> bool:
    """Return True if a token's row is tiny, constant, or equal to the row of another token.

    A token without a measured row counts as trained.

    Args:
        token: id of the token.
        rows: token id -> properties of its row.
        median_norm: a row with at most a thousandth of it is tiny.
    """
    if token not in rows:
        return False
    row = rows[token]
    alike = any(other.digest == row.digest for at, other in rows.items() if at != token)
    return row.norm <= _TINY_SHARE * median_norm or row.is_constant or alike
