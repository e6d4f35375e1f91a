"""How many operations a token costs in training, and how many a device can do: for the MFU.

[Note: MFU] Model FLOPs utilisation after PaLM (Chowdhery et al. 2022, appendix B): 6 N + 12 L H T
operations a token for N parameters without the embedding lookup, L layers of width H and sequences
of T tokens, divided by the device's dense bf16 peak. Recomputation does not count as work.
"""

import torch
from torch import nn

from toolkit import models
from toolkit.formats import assets_of
from toolkit.models.packed_linear import count_values
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


def training_flops(model: nn.Module, sequence_length: int) -> float:
    """Return the FLOPs of one token of forward and backward; see [Note: MFU]. A frozen parameter
    has no gradient and costs two a token less; an untied embedding is only looked up.
    """
    base = base_of(model)
    width = getattr(base.config.get_text_config(), "hidden_size", 0)
    looked_up = 0 if assets_of(model).tied else models.vocabulary_size(base) * width
    values = count_values(model)
    frozen = values - sum(p.numel() for p in model.parameters() if p.requires_grad)
    weights = 6.0 * (values - looked_up) - 2.0 * max(0, frozen - looked_up)
    return weights + 12.0 * len(models.decoder_layers(base)) * width * sequence_length


def device_peak_flops(device: torch.device) -> float | None:
    """Return the dense bf16 peak of a known GPU in FLOP/s, None for others and for CPUs."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((_PEAKS[k] for k in sorted(_PEAKS, key=len, reverse=True) if k in name), None)
