"""/v1/messages/batches: Anthropic's batches of messages."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from protocol.common import Wire

MAX_REQUESTS = 100_000
"""Maximum number of requests in a batch, whatever the settings allow."""


class BatchedRequest(Wire):
    """A request of a batch."""

    custom_id: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    """Name of the request among those of the batch. Example: "first" """
    params: dict[str, Any]
    """Body of the request to /v1/messages, without `stream`. It is checked when its turn comes.
    Example: {"model": "claude", "max_tokens": 64, "messages": [{"role": "user", "content": "Hello"}]}"""


class BatchRequest(Wire):
    """Requests to answer when the server has nothing else to do."""

    requests: list[BatchedRequest] = Field(min_length=1, max_length=MAX_REQUESTS, fail_fast=True)
    """The requests. Example: [{"custom_id": "first", "params": {}}]"""


class RequestCounts(BaseModel):
    """Numbers of requests. All are `processing` until the batch has ended."""

    processing: int
    """Requests of a batch that has not ended."""
    succeeded: int
    """Requests with an answer."""
    errored: int
    """Requests with an error."""
    canceled: int
    """Requests that were cancelled before they began."""
    expired: int
    """Requests that had not begun within 24 hours."""


class MessageBatch(BaseModel):
    """A batch."""

    id: str
    """Id of the batch."""
    type: Literal["message_batch"] = "message_batch"
    """Kind of this object."""
    processing_status: Literal["in_progress", "canceling", "ended"]
    """State of the batch."""
    request_counts: RequestCounts
    """Numbers of requests."""
    created_at: str
    """Time of creation."""
    expires_at: str
    """Time at which requests that have not begun expire."""
    ended_at: str | None
    """Time at which the last request ended."""
    cancel_initiated_at: str | None
    """Time of the request to cancel the batch."""
    archived_at: None = None
    """Always null: a batch is removed with its results."""
    results_url: str | None
    """URL of the results, once the batch has ended."""


class BatchesPage(BaseModel):
    """Some of the batches."""

    data: list[MessageBatch]
    """Batches, the newest first."""
    has_more: bool
    """Whether there are more in this direction."""
    first_id: str | None
    """Id of the first of these, for `before_id`."""
    last_id: str | None
    """Id of the last of these, for `after_id`."""


class DeletedBatch(BaseModel):
    """A batch that is no more."""

    id: str
    """Id of the batch."""
    type: Literal["message_batch_deleted"] = "message_batch_deleted"
    """Kind of this object."""
