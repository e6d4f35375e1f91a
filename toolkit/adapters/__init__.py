"""Adapters (LoRA and its kin) on a model: targets, first values, PEFT's folder, coverage."""

from typing import TYPE_CHECKING

from toolkit.lazy import import_when_used

if TYPE_CHECKING:
    from toolkit.adapters.base import base_digest
    from toolkit.adapters.coverage import coverage_lines, idle_adapter_warnings
    from toolkit.adapters.lora import add_adapters, prepare_adapters, refuse_adapted_experts
    from toolkit.adapters.targets import check_target_names

import_when_used(__name__)
