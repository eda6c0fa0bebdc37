"""What server and clients say to each other, as Flower records.

    server -> client   "train"          TrainOrder and the global weights
    client -> server                    Report, with the weights if the order said so
    server -> client   "train.correct"  CorrectOrder, and the newest global weights as the teacher
    client -> server                    Report and the corrected weights

The second pair is for algorithms that correct before they send. Weights travel as a Flower
ArrayRecord, one array a tensor of the state dict; a tensor under two names (tied weights) once.
"""

import dataclasses
from typing import Any, TypeVar

import torch
from torch import nn

from lightning_collider.federated.algorithms import Weights

try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
except ImportError as error:
    raise ImportError(
        "federated training needs Flower: pip install 'lightning-collider[federated]'", name="flwr"
    ) from error

TRAIN, CORRECT = "train", "train.correct"
ORDER, REPORT, WEIGHTS = "order", "report", "weights"  # names of the records in a message


@dataclasses.dataclass(frozen=True)
class TrainOrder:
    """Train from the weights that come with it."""

    job: int  # numbers this client's jobs, from 0
    version: int  # tau, of the weights
    extra_steps: int  # optimizer steps behind the epochs
    upload: bool  # send the weights at once; else keep them until a CorrectOrder


@dataclasses.dataclass(frozen=True)
class CorrectOrder:
    """Distil from the weights that come with it, if there are steps, and send yours."""

    job: int
    version: int  # t, of the teacher
    steps: int
    lam: float
    temperature: float


@dataclasses.dataclass(frozen=True)
class Report:
    """What a client has done for one order."""

    job: int
    client: int  # number of its part of the data
    examples: int  # examples it holds
    loss: float  # mean training loss of this order's steps; 0 without steps
    work: float  # cost in forward and backward passes of one example


Body = TypeVar("Body", TrainOrder, CorrectOrder, Report)


class BadMessage(ValueError):
    """A message whose records are not what they should be."""


def pack(record: str, body: TrainOrder | CorrectOrder | Report, weights: Any = None) -> RecordDict:
    """The content of a message: a body, and weights (dict of tensors or ArrayRecord) if any."""
    content = RecordDict({record: ConfigRecord(dataclasses.asdict(body))})
    if weights is not None:
        content[WEIGHTS] = weights if isinstance(weights, ArrayRecord) else to_record(weights)
    return content


def unpack(message: Message, record: str, kind: type[Body]) -> Body:
    """The body of a message. Raises BadMessage when it is missing or a field is of another type."""
    found = message.content.get(record)
    if not isinstance(found, ConfigRecord):
        raise BadMessage(f"it has no record {record!r}")
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        value = found.get(field.name)
        if type(value) is not field.type:
            raise BadMessage(
                f"{record}.{field.name} must be of type {getattr(field.type, '__name__', '')}, "
                f"not {value!r}"
            )
        values[field.name] = value
    return kind(**values)


def weights_in(message: Message) -> Weights:
    """The weights of a message. Raises BadMessage when there are none, or they cannot be read."""
    record = message.content.get(WEIGHTS)
    if not isinstance(record, ArrayRecord):
        raise BadMessage("it has no weights")
    return to_weights(record)


def to_record(weights: Weights) -> ArrayRecord:
    """Weights as Flower sends them. Raises ValueError for bfloat16, which NumPy does not have."""
    for name, tensor in weights.items():
        if tensor.dtype == torch.bfloat16:
            raise ValueError(
                f"{name} is bfloat16, which cannot be sent: keep float32 weights and train with "
                "precision='bf16-mixed'"
            )
    return ArrayRecord({name: Array(t.detach().cpu().numpy()) for name, t in weights.items()})


def to_weights(record: ArrayRecord) -> Weights:
    """The opposite of `to_record`. Raises BadMessage for an array that cannot be read."""
    weights = {}
    for name, array in record.items():
        try:
            weights[name] = torch.from_numpy(array.numpy())
        except Exception as error:  # bytes from outside: whatever NumPy makes of them
            raise BadMessage(f"the array {name!r} cannot be read: {error}") from error
    return weights


def weights_of(module: nn.Module) -> Weights:
    """Copies of a module's parameters and buffers by name; of tied ones, the first name's."""
    found: dict[int, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), name)
    state = module.state_dict()
    return {name: state[name].detach().cpu().clone() for name in found.values()}


def load_weights(module: nn.Module, weights: Weights) -> None:
    """Put `weights_of` another module into this one.

    Raises ValueError when they are another model's.
    """
    difference = mismatch(weights, weights_of(module))
    if difference is not None:
        raise ValueError(f"these are another model's weights: {difference}. Use the same recipe")
    module.load_state_dict(weights, strict=False)


def mismatch(found: Weights, expected: Weights) -> str | None:
    """The first difference in names, shapes or dtypes of two models' weights, in words."""
    lacking, unknown = expected.keys() - found.keys(), found.keys() - expected.keys()
    if lacking or unknown:
        return f"lacking {sorted(lacking)[:3]}, unknown {sorted(unknown)[:3]}"
    for name, tensor in expected.items():
        other = found[name]
        if other.shape != tensor.shape:
            return f"{name} has shape {tuple(other.shape)}, not {tuple(tensor.shape)}"
        if other.dtype != tensor.dtype:
            return f"{name} is {other.dtype}, not {tensor.dtype}"
    return None
