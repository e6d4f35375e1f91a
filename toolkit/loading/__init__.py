"""Bytes into shards: a checkpoint streamed in, or random weights drawn."""

from typing import TYPE_CHECKING

from toolkit.lazy import import_when_used

if TYPE_CHECKING:
    from toolkit.loading.convert import LoadGroup, build_base_reader, load_group, plan_load_groups
    from toolkit.loading.materialisation import init_weights, materialise
    from toolkit.loading.pretrained import (
        LoadReport,
        check_weights_fit,
        find_load_problems,
        load_or_init,
        load_pretrained,
    )

import_when_used(__name__)
