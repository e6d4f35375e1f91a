"""How many operations a token costs in training, counted on the model as it is.

Owns the count of parameters that goes into it; the formula is `metrics.flops_per_token`'s.
"""

from torch import nn

from toolkit.formats import assets_of
from toolkit.models import causal_lm as models
from toolkit.models.packed_linear import count_values
from toolkit.models.peft_model import base_of
from toolkit.training.metrics import flops_per_token


def training_flops(model: nn.Module, sequence_length: int) -> float:
    """Return the FLOPs of one token of forward and backward: frozen parameters (the base of
    adapters, 4-bit ones too) get no gradient of their own, and an untied embedding is looked up.
    """
    base = base_of(model)
    width = getattr(base.config.get_text_config(), "hidden_size", 0)
    looked_up = 0 if assets_of(model).tied else models.vocabulary_size(base) * width
    values = count_values(model)
    return flops_per_token(
        values,
        looked_up,
        len(models.decoder_layers(base)),
        width,
        sequence_length,
        frozen=values - sum(p.numel() for p in model.parameters() if p.requires_grad),
    )
