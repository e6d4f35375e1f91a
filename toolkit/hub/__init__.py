"""Publishing to the Hugging Face Hub: the push and the model card."""

from toolkit.hub.upload import push

__all__ = ["push"]
