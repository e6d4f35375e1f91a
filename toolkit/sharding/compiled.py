"""Compiled forwards: without the attention kernel that they cannot hold."""

import functools
from typing import Any

import torch
from torch import nn

from toolkit.formats import torch_private
from toolkit.models.attention import mark_borders_dynamic


def compile_forward(module: nn.Module, **options: Any) -> None:
    """Compile `module`'s call, in place, to code without cuDNN's attention: its softmax statistics
    lie in another order than its fake kernel says, and compiled code stops there (seen on an H100
    with torch 2.11). Evaluations and generation, which are not compiled, keep it.
    """
    module.compile(**options)
    compiled: Any = module._compiled_call_impl  # where `compile` puts it, in torch 2.11 to 2.15
    dynamo = torch_private("_dynamo", "eval_frame")

    @functools.wraps(compiled)
    def without_cudnn(*args: Any, **kwargs: Any) -> Any:
        mark_borders_dynamic(kwargs)
        before = torch.backends.cuda.cudnn_sdp_enabled()
        if not before or dynamo._stance.stance == "force_eager":
            return compiled(*args, **kwargs)
        torch.backends.cuda.enable_cudnn_sdp(False)
        try:
            return compiled(*args, **kwargs)
        finally:
            torch.backends.cuda.enable_cudnn_sdp(before)

    module._compiled_call_impl = without_cudnn
