"""Work that is out: the grid it goes through, a client's job, and the check of what comes back."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from flwr.app import Message
from flwr.common.constant import ErrorCode

from lightning_collider.federated.algorithms import Weights
from lightning_collider.federated.messages import BadMessage, mismatch, weights_in

# errors that say a client or its reply is gone; all others are the client's own
GONE = (
    ErrorCode.NODE_UNAVAILABLE,
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
)


class Mailbox(Protocol):
    """The part of a Flower Grid that the server uses."""

    def get_node_ids(self) -> Iterable[int]: ...

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]: ...

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]: ...


@dataclass
class Job:
    """What a client is working on."""

    node: int
    number: int  # of this client's jobs
    version: int  # tau
    base: Weights | None  # the weights it started from, if the algorithm needs them
    deadline: float  # seconds on the server's clock
    corrected_version: int  # of the teacher; tau without a correction
    correcting: bool = False


def checked_weights(reply: Message, expected: Weights) -> Weights:
    """The weights of a reply. Raises BadMessage unless they are finite, and like `expected`."""
    weights = weights_in(reply)
    difference = mismatch(weights, expected)
    if difference is not None:
        raise BadMessage(f"the weights are another model's: {difference}")
    for name, tensor in weights.items():
        if not torch.isfinite(tensor).all():
            raise BadMessage(f"{name} is not finite")
    return weights
