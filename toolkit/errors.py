"""The errors a user can meet. Each says what was expected, what came and what to do next.

Owns the exception classes. Knows nothing else of the toolkit but what a secret looks like.
"""

from toolkit.redact import scrub


class ToolkitError(Exception):
    """A failure with a cause the user can act on; printed as one line, without a traceback.

    A value that a message repeats may be a token that was put into the wrong place: it is not
    repeated.
    """

    def __str__(self) -> str:
        return scrub(super().__str__())


class ConfigError(ToolkitError):
    """A setting is unknown, of the wrong type, or contradicts another one."""


class LaunchError(ToolkitError):
    """The processes of the run did not come up as the launcher was asked to start them."""


class ModelError(ToolkitError):
    """The model folder or its architecture cannot be used."""


class DataError(ToolkitError):
    """The data cannot be used; names the file and the row or column where there is one."""


class ShardingError(ToolkitError):
    """The model cannot be sharded as asked."""


class LoadingError(ToolkitError):
    """Weights and model do not fit together; names the tensors."""


class TrainingError(ToolkitError):
    """A step produced something no training should go on from."""


class CheckpointError(ToolkitError):
    """A checkpoint cannot be written, read or trusted; names the file or the tensor."""


class ExportError(ToolkitError):
    """A checkpoint cannot be turned into a Hugging Face folder."""


class HubError(ToolkitError):
    """The Hub cannot be reached, or refuses; the message says what to do and holds no secret."""
