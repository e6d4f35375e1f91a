"""Publishing on the Hugging Face Hub: a verified export becomes one commit, with a model card."""

from toolkit.hub.publishing import check, publish
from toolkit.hub.upload import Preview, preview, push

__all__ = ["Preview", "check", "preview", "publish", "push"]
