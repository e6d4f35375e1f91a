"""Read files of unknown origin: Hugging Face folders, safetensors, DCP checkpoints, hashes.

Also writes files that survive a power loss (`synced_files`).
"""

from typing import TYPE_CHECKING

from toolkit.lazy import import_when_used

if TYPE_CHECKING:
    from toolkit.formats import export_manifest
    from toolkit.formats.dcp_metadata import METADATA_FILE, read_metadata
    from toolkit.formats.dcp_table import ChunkTable, TensorsMetadata, table_from_metadata
    from toolkit.formats.dcp_tensors import (
        Chunk,
        check_blob,
        find_boxes_fault,
        find_coverage_fault,
        tensor_chunks,
    )
    from toolkit.formats.hf_assets import HFAssets, assets_of
    from toolkit.formats.hf_folder import (
        ADAPTER_FILE,
        ADAPTER_WEIGHTS,
        ASSET_FILES,
        INDEX_FILE,
        MAX_TEMPLATE_BYTES,
        NEXT_TOKEN_LAYERS,
        SINGLE_FILE,
        asset_files,
        check_parsed_files,
        is_adapter_folder,
        nested_items,
        read_config,
    )
    from toolkit.formats.hub_access import download_assets, local_folder
    from toolkit.formats.layout import (
        Tensors,
        like_dtensor,
        local_slices,
        local_tensor,
        reshard,
        slice_like,
        wrap_like,
    )
    from toolkit.formats.plain_files import (
        BLOCK,
        find_damaged_tensors,
        is_hub_cache_link,
        is_inner_path,
        is_plain_name,
        resolve_plain_file,
    )
    from toolkit.formats.private import torch_private, transformers_private
    from toolkit.formats.safetensors_files import (
        DTYPE_NAMES,
        DTYPES,
        FileTensor,
        OpenFiles,
        header_metadata,
        read_header,
        read_weights,
        source_dtypes,
        weight_files,
    )
    from toolkit.formats.source_names import (
        ExportGroup,
        SourceKeys,
        conversion_mapping,
        convert_back,
        export_groups,
        group_source_keys,
        map_source_keys,
        split_mapping,
        summarise_names,
        use_source_names,
    )
    from toolkit.formats.stored_tensors import (
        StoredTensor,
        compute_block_sum,
        compute_row_sum,
        contiguous_tensor,
        first_difference,
        read_blocks,
        read_tensor,
        same_values,
    )

import_when_used(__name__)
