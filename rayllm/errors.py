"""Every error that rayllm raises on purpose, and nothing else.

    RayLLMError
    ├── ConfigError         an option cannot be honoured; the start ends
    ├── ModelError          a model's files cannot be used; names the file, and the tensor if there is one
    ├── RequestError        a request's own fault, status 400; names the field
    │   ├── ContextTooLong  prompt and output do not fit the context
    │   └── ModelNotFound   no such model, status 404
    ├── Overloaded          refused because the service is full, status 503; says when to come back
    ├── GenerationFailed    an engine gave up on a request that it had begun
    ├── ReplicaLost         the engine replica behind a request is gone; the request may go on elsewhere
    └── EngineDead          the engine failed and serves no more

Errors of libraries are translated where they enter, and nowhere else.
"""

from collections.abc import Mapping


class RayLLMError(Exception):
    """Base of all errors that rayllm raises on purpose."""


class ConfigError(RayLLMError):
    """An option cannot be honoured.

    `option` is its name with dashes, `reason` says why, `cure` what to do about it.
    """

    def __init__(self, option: str, reason: str, cure: str = "") -> None:
        super().__init__(f"{option}: {reason}" + (f"; {cure}" if cure else ""))
        self.option, self.reason, self.cure = option, reason, cure


class ModelError(RayLLMError):
    """A model's files cannot be used. `file` and, where it applies, `tensor` say which part."""

    def __init__(self, file: str, reason: str, tensor: str | None = None) -> None:
        super().__init__(f"{file}: " + (f"tensor {tensor}: " if tensor else "") + reason)
        self.file, self.reason, self.tensor = file, reason, tensor


class RequestError(RayLLMError):
    """A request's own fault. `param` is the field at fault, `status` the HTTP status."""

    status = 400
    code: str | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message, self.param = message, param

    def renamed(self, names: Mapping[str, str]) -> "RequestError":
        """This error, where the field at fault is called differently by the API that the client uses."""
        if name := names.get(self.param or ""):
            self.message, self.param = f"{name}: {self.message}", name
        return self


class ContextTooLong(RequestError):
    """Prompt and wanted output do not fit the model's context."""

    code = "context_length_exceeded"


class ModelNotFound(RequestError):
    """The request names a model that is not served."""

    status = 404
    code = "model_not_found"


class Overloaded(RayLLMError):
    """The service is full; the same request may succeed after `retry_after` seconds."""

    status = 503

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.message, self.retry_after = message, retry_after


class GenerationFailed(RayLLMError):
    """An engine gave up on a request that it had begun. The message is fit for its client."""


class ReplicaLost(RayLLMError):
    """The engine replica behind a request is gone."""


class EngineDead(RayLLMError):
    """The engine failed and serves no more requests."""
