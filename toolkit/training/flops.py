"""FLOPs of a training step and peaks of GPUs, for the model FLOPs utilisation (MFU)."""

from typing import Any

from torch import nn

from toolkit.models.layers import active_expert_shares, decoder_layers, parameters_outside_text
from toolkit.models.packed_linear import packed_weights
from toolkit.models.peft_model import base_of

# Dense bf16 tensor-core peaks of the vendors' data sheets, FLOP/s; longest name first.
_PEAKS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H20": 148e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "GB200": 2500e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "RTX 4090": 165e12,
    "MI300X": 1307e12,
    "MI250X": 191e12,
}


def flops_per_token(model: nn.Module, sequence_length: int, *, forward_only: bool = False) -> float:
    """Compute the FLOPs per token of a forward and backward, for the MFU: 6 N + 12 L H T.

    N is the number of parameters, and L the number of layers. H is the total width of the attention
    heads of a layer, and T the sequence length (PaLM, Chowdhery et al. 2022, appendix B). These
    parameters count differently:

    - routed experts: only the share of them to which a token is sent;
    - an untied embedding, which is only looked up, and image towers: not at all;
    - frozen parameters: 4 instead of 6 FLOPs each.

    Recomputation for activation checkpointing does not count.

    Args:
        model: the model, sharded or on meta.
        sequence_length: T, in tokens.
        forward_only: compute 2 N + 4 L H T, without the backward.
    """
    base = base_of(model)
    head = base.get_output_embeddings()
    multiplied = set() if head is None else {id(p) for p in head.parameters()}
    tables = (m for m in base.modules() if isinstance(m, nn.Embedding))
    idle = {id(p) for m in tables for p in m.parameters()} - multiplied
    idle |= {id(model.get_parameter(name)) for name in parameters_outside_text(model)}
    shares, packed, weights = active_expert_shares(model), packed_weights(model), 0.0
    for name, p in model.named_parameters():
        values = packed[name].elements if name in packed else p.numel()
        if id(p) not in idle:
            products = 2 if forward_only else 6 if p.requires_grad else 4
            weights += values * shares.get(name, 1.0) * products
    config = base.config.get_text_config()
    if config.is_heterogeneous:  # Gemma 4: heads of full attention are wider
        widths = sum(_attention_width(layer) for layer in config.per_layer_config)
    else:
        widths = len(decoder_layers(base)) * _attention_width(config)
    return weights + (4.0 if forward_only else 12.0) * widths * sequence_length


def _attention_width(config: Any) -> int:
    """Return the number of heads times the head size; without these settings, the hidden size."""
    heads, size = (getattr(config, n, None) for n in ("num_attention_heads", "head_dim"))
    if type(heads) is int and type(size) is int:
        return heads * size
    return getattr(config, "hidden_size", 0)


def find_peak_flops(name: str) -> float | None:
    """Return the dense bf16 peak in FLOP/s of the GPU whose name is a part of `name`.

    Returns None for an unknown GPU. If several known names match, the longest one counts.
    """
    return next((_PEAKS[k] for k in sorted(_PEAKS, key=len, reverse=True) if k in name), None)
