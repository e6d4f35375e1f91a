"""Publishing on the Hugging Face Hub: a verified export becomes one commit, with a model card."""

from typing import TYPE_CHECKING

from toolkit.lazy import import_when_used

if TYPE_CHECKING:
    from toolkit.hub.publishing import check, publish
    from toolkit.hub.upload import Preview, preview, push

import_when_used(__name__)

__all__ = ["Preview", "check", "preview", "publish", "push"]
