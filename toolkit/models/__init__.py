"""A Hugging Face causal LM without bytes: its shapes, layers, ties and head, on meta."""

from typing import TYPE_CHECKING

from toolkit.lazy import import_when_used

if TYPE_CHECKING:
    from toolkit.models.causal_lm import (
        allow_remote_code,
        allows_remote_code,
        build_on_meta,
        check_usable,
        find_fp32_tensors,
        loaded_dtype,
        model_on_meta,
        prepare,
        vocabulary_size,
    )
    from toolkit.models.classes import model_class_name
    from toolkit.models.context_probe import check_context_parallel
    from toolkit.models.expert_parallel import check_expert_parallel
    from toolkit.models.float8 import check_float8
    from toolkit.models.layers import decoder_layers, tied_families, tied_names
    from toolkit.models.quantise import check_quantisation

import_when_used(__name__)
