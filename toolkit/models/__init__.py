"""A Hugging Face causal LM without bytes: its shapes, layers, ties and head, on meta."""

from typing import TYPE_CHECKING

from toolkit.lazy import import_when_used

if TYPE_CHECKING:
    from toolkit.models.causal_lm import (
        build_on_meta,
        check_usable,
        kept_in_fp32,
        loaded_dtype,
        model_on_meta,
        prepare,
        trust_code,
        trusts_code,
        vocabulary_size,
    )
    from toolkit.models.classes import plain_name
    from toolkit.models.layers import decoder_layers, tied_families, tied_names
    from toolkit.models.quantise import check_quantisation

import_when_used(__name__)
