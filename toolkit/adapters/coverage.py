"""Report which base weights are adapted, with warnings."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from toolkit import ranks
from toolkit.formats import local_tensor
from toolkit.models import peft_model
from toolkit.models.layers import expert_counts, parameters_outside_text
from toolkit.models.packed_linear import packed_weights
from toolkit.models.patterns import replace_numbers
from toolkit.models.reward import reward_head
from toolkit.tables import format_table, group_numbered_names

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class CoverageRow:
    """One matrix of the base: its name and shape, how it is trained, and the part it belongs to."""

    name: str  # of the parameter, in the base
    shape: tuple[int, ...]
    method: str  # `LoRA`, `rsLoRA`, `DoRA`, `in full`, or `-` (not trained)
    trained: int  # number of trained elements
    part: str  # `layer`, `experts` (routed), `router`, `embedding` (or head), `outside_text`
    is_packed: bool = False  # stored in 4 bits or float8

    @property
    def elements(self) -> int:
        """Number of values in the matrix."""
        return math.prod(self.shape)


def coverage_rows(model: nn.Module) -> list[CoverageRow]:
    """List a `CoverageRow` for each matrix of the base of an adapted model, trained or not.

    Biases and other vectors are skipped. A tied matrix has one row. Stacked experts are one matrix.
    """
    layers = peft_model.adapted_parameters(model)
    copied_modules = peft_model.copied_modules(model).items()
    copied_parameters = {
        f"{name}.{leaf}": p for name, (_, m) in copied_modules for leaf, p in m.named_parameters()
    }
    rows = []
    with peft_model.unwrapped_base(model) as base:
        ends = (base.get_input_embeddings(), base.get_output_embeddings(), reward_head(base))
        outside = {id(p) for end in ends if end is not None for p in end.parameters()}
        experts = expert_counts(base)
        outside_text = parameters_outside_text(base)
        packed = packed_weights(base)
        for name, parameter in base.named_parameters():
            path, _, leaf = name.rpartition(".")
            owner = base.get_submodule(path)
            # Use the shape of the matrix, not that of its packed column.
            shape = packed[name].shape if name in packed else tuple(parameter.shape)
            # Each expert may have a bias; these are stacked.
            if len(shape) < 2 or "bias" in leaf:
                continue
            part = (
                "embedding"
                if id(parameter) in outside
                else _classify_matrix(name, owner, shape, experts)
            )
            part = "outside_text" if name in outside_text else part
            method = "-"
            trained = 0
            if name in copied_parameters:
                method = "in full"
                trained = copied_parameters[name].numel()
            elif name in layers:
                method = _method_name(model)
                trained = sum(p.numel() for p in peft_model.layer_parameters(layers[name]).values())
            rows.append(CoverageRow(name, shape, method, trained, part, name in packed))
    return rows


def covered_share(rows: Iterable[CoverageRow]) -> float:
    """Compute the share of the base's values that lie in trained matrices.

    Embedding, head and modules outside of the text path are ignored. A matrix with an adapter
    counts in full.

    Returns:
        A number from 0 to 1; 0 if there are no matrices.
    """
    inner_rows = [row for row in rows if row.part not in ("embedding", "outside_text")]
    total = sum(row.elements for row in inner_rows)
    return sum(row.elements for row in inner_rows if row.trained) / total if total else 0.0


def coverage_lines(model: nn.Module) -> list[str]:
    """Format lines for the log: a summary of the adapters, a table of matrices, and warnings.

    A warning is added if routed experts have no adapter, and another one if a router has one.
    """
    rows = coverage_rows(model)
    config = peft_model.adapter_config(model)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(row.elements for row in rows)
    lines = [
        f"adapters   {_method_name(model)} of rank {config['r']}, alpha {config['lora_alpha']}: "
        f"{trained:,} elements are trained, {trained / max(1, total):.2%} of the base's matrices; "
        f"{covered_share(rows):.1%} of the matrices between embedding and head are covered",
        *_format_table(rows),
    ]
    if unadapted := [row for row in rows if row.part == "experts" and not row.trained]:
        names = ", ".join(sorted({_common_ending(row.name) for row in unadapted}))
        share = sum(r.elements for r in unadapted) / total
        remedy = "PEFT has no adapter for them"
        if any(row.is_packed for row in unadapted):
            remedy = "lora.quantize_moe_experts keeps them frozen in 4 bits"
        elif all(len(row.shape) > 2 for row in unadapted):
            remedy = f"lora.target_parameters: [{names}] trains them (without dropout and DoRA)"
        experts_text = f"{names} ({share:.0%} of the base's matrices)"
        lines.append(f"WARNING    the routed experts are not adapted: {experts_text}. {remedy}")
    if routers := [row for row in rows if row.part == "router" and row.trained]:
        name = group_numbered_names([row.name for row in routers])[0][0]
        lines.append(
            f"WARNING    the router is adapted too ({name}): which expert a token goes to will "
            "change. lora.target_modules with a list of names leaves it alone"
        )
    return lines


def find_idle_adapters(model: nn.Module) -> list[str]:
    """List the modules whose adapters are still zero after one or more steps. Collective.

    Such adapters got no gradient. An example is an adapter that the run continues (`lora.from`) on
    mamba's `dt_proj`, whose weight is read without calling the module. If all adapters are zero,
    the learning rate was zero, and the list is empty. Routed experts are never listed, because they
    may not have received a token yet.
    """
    layers = peft_model.adapted_parameters(model)
    experts = {row.name for row in coverage_rows(model) if row.part == "experts"}
    parameters = [peft_model.layer_parameters(layer) for layer in layers.values()]
    # The factor that starts at zero, of each pair.
    zero = [p.get("lora_B", p.get("lora_embedding_A")) for p in parameters]
    moved = ranks.any_over_ranks([p is not None and bool(local_tensor(p).any()) for p in zero])
    names = [n for n, adds in zip(layers, moved, strict=True) if not adds]
    if len(names) == len(layers):
        return []
    return [n.removesuffix(".weight") for n in names if n not in experts]


def idle_adapter_warnings(model: nn.Module) -> list[str]:
    """Return a list with one warning about adapters without a gradient, or []. Collective.

    The warning counts the modules of `find_idle_adapters` and names one.
    """
    idle = find_idle_adapters(model) if peft_model.has_adapters(model) else []
    return [
        f"WARNING: {len(idle)} adapters get no gradient, such as {name}: the model reads their "
        "weights without a forward; name them in lora.exclude_modules"
        for name in idle[:1]
    ]


def _common_ending(name: str) -> str:
    """Return the end of a parameter's name that layers share: at most three parts, no layer number.

    An example is `mlp.up_proj.weight` for `layers.3.mlp.up_proj.weight`.
    """
    return ".".join(replace_numbers(name).split(".")[-3:]).rpartition("*.")[2]


def _method_name(model: nn.Module) -> str:
    """Return `LoRA`, `rsLoRA` or `DoRA`, by the settings of the model's adapters."""
    config = peft_model.adapter_config(model)
    return "DoRA" if config["use_dora"] else "rsLoRA" if config["use_rslora"] else "LoRA"


def _classify_matrix(name: str, owner: nn.Module, shape: tuple[int, ...], experts: set[int]) -> str:
    """Classify a matrix as `router`, `experts` (routed experts) or `layer` (anything else).

    A router has the name of a router and one row per expert. Routed experts have the name of
    experts, or are stacked along the first dim. Shared experts count as `layer`.

    Args:
        name: full name of the parameter.
        owner: the module that holds it.
        shape: its shape, unpacked.
        experts: all numbers of experts that layers of the model have.
    """
    parts = name.split(".")
    routes = any("router" in p or p in ("gate", "wg") for p in parts)
    if routes and len(shape) == 2 and shape[0] in experts:
        return "router"
    stacked = len(shape) > 2 and shape[0] in experts and not isinstance(owner, _CONVOLUTIONS)
    if stacked or any("expert" in p and "shared" not in p for p in parts):
        return "experts"
    return "layer"


def _format_table(rows: list[CoverageRow]) -> list[str]:
    """Format the rows as lines of a text table; equal matrices of several layers share a line."""
    lines = [["  matrix", "count", "shape", "trained as", "trained"]]
    for name, indices in group_numbered_names(
        [row.name for row in rows], [(row.shape, row.method) for row in rows]
    ):
        first = rows[indices[0]]
        count = len(indices)
        shape = " x ".join(map(str, first.shape))
        trained = f"{first.trained * count:,}" if first.trained else ""
        lines.append([f"  {name}", str(count), shape, first.method, trained])
    return format_table(lines, right={1, 4})
