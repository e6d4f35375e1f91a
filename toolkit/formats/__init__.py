"""Read files of unknown origin: Hugging Face folders, safetensors, DCP checkpoints, hashes.

Also writes files that survive a power loss (`synced_files`).
"""

from typing import TYPE_CHECKING

from toolkit.lazy import import_when_used

if TYPE_CHECKING:
    from toolkit.formats import export_manifest
    from toolkit.formats.dcp_metadata import METADATA_FILE, read_metadata
    from toolkit.formats.dcp_table import ChunkTable, TensorsMetadata, chunk_table
    from toolkit.formats.dcp_tensors import (
        Chunk,
        boxes_fault,
        check_blob,
        coverage_fault,
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
        check_config,
        is_adapter_folder,
        nested_items,
        read_config,
    )
    from toolkit.formats.hub_access import local_folder, obtain_assets
    from toolkit.formats.layout import (
        Tensors,
        like_dtensor,
        local_slices,
        local_tensor,
        part_of,
        reshard,
    )
    from toolkit.formats.plain_files import (
        BLOCK,
        damaged_parts,
        is_cached,
        is_inner_path,
        is_plain_name,
        plain_file,
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
        loaded_as,
        source_keys,
        split_mapping,
        summarise_names,
        use_source_names,
    )
    from toolkit.formats.stored_tensors import (
        StoredTensor,
        block_sum,
        blocks,
        first_difference,
        in_one_piece,
        row_sum,
        same_values,
        whole,
    )

import_when_used(__name__)
