"""What the server does with an update: FedAvg, FedAsync, FedBuff and FedADT behind one interface.

Notation. The server's weights w have a version t, the number of aggregations so far. A client
trained from version tau and sends w_client; its delay is d = t - tau.

    FedAvg    w <- sum_i n_i w_i / sum_i n_i, once all clients of a round have replied
              (McMahan et al., arXiv 1602.05629)
    FedAsync  w <- (1 - a_d) w + a_d w_client at once, a_d = a (1 + d)^-b
              (Xie et al., arXiv 1903.03934, polynomial staleness)
    FedBuff   w <- w + eta / K sum_i (1 + d_i)^-b (w_i - w_tau_i), once K updates have come
              (Nguyen et al., arXiv 2106.06639)
    FedADT    FedAsync, with stale updates corrected by distillation before they are sent
              (the idea: arXiv 2504.04081; public to us is its abstract, the formulas are ours)

Weights are dicts of tensors by name. Floating-point tensors are averaged, others (counters in
buffers) are taken from the newest update.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_collider.federated.distillation import StageWeight

Weights = dict[str, Tensor]
DELAYS = ("base", "correction")


@dataclass(frozen=True)
class Update:
    """What a client sent.

    Attributes:
        weights: after training, and after the correction where there was one.
        base: the weights that training started from, for an algorithm that keeps them.
        base_version: tau, the version of `base`.
        corrected_version: version of the teacher of the correction; tau where there was none.
        examples: training examples the client holds.
    """

    weights: Weights
    base: Weights | None
    base_version: int
    corrected_version: int
    examples: int


@dataclass(frozen=True)
class Correction:
    """Distillation that a client does between training and sending; see distillation.py."""

    steps: int  # optimizer steps; 0: send as it is
    lam: float  # weight of the teacher, in [0, 1]
    temperature: float


class Algorithm(ABC):
    """The server's side of a federated algorithm.

    Attributes:
        synchronous: clients get new work only when all have replied.
        corrects: a client reports that it has trained, and sends its weights after a correction.
        keeps_base: it needs the weights that an update started from.
        extra_steps: optimizer steps of plain training behind the local epochs.
    """

    synchronous = False
    corrects = False
    keeps_base = False
    extra_steps = 0

    @abstractmethod
    def receive(self, weights: Weights, version: int, update: Update) -> Weights | None:
        """Take in an update; the server's new weights, or None while there are none."""

    def close_round(self, weights: Weights) -> Weights | None:
        """The new weights after a round, for a synchronous algorithm; None without an update."""
        return None

    def delay(self, version: int, update: Update) -> int:
        """d, the number of aggregations that the update has missed."""
        return version - update.base_version

    def share(self, delay: int) -> float:
        """The factor that an update of this delay is weighted with."""
        return 1.0

    def correction(self, version: int, base_version: int) -> Correction:
        """What a client that trained from `base_version` does before it sends."""
        return Correction(0, 0.0, 1.0)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of updates that are taken in and not yet in the weights."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        assert not state


class _Sum:
    """A weighted sum of weights, in float64, with the newest of what cannot be summed."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.tensors: Weights = {}
        self.total, self.count = 0.0, 0

    def add(self, weights: Weights, factor: float) -> None:
        for name, tensor in weights.items():
            if not tensor.is_floating_point():
                self.tensors[name] = tensor
            elif name in self.tensors:
                self.tensors[name] += factor * tensor.double()
            else:
                self.tensors[name] = factor * tensor.double()
        self.total += factor
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        tensors = {name: t.clone() for name, t in self.tensors.items()}
        return {"tensors": tensors, "total": self.total, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensors = {name: t.clone() for name, t in state["tensors"].items()}
        self.total, self.count = state["total"], state["count"]


class FedAvg(Algorithm):
    """The synchronous average, weighted by the clients' numbers of examples."""

    synchronous = True

    def __init__(self) -> None:
        self._sum = _Sum()

    def receive(self, weights: Weights, version: int, update: Update) -> None:
        self._sum.add(update.weights, float(update.examples))

    def close_round(self, weights: Weights) -> Weights | None:
        total, sums = self._sum.total, self._sum.tensors
        self._sum.clear()
        if not total:
            return None
        return {
            name: (sums[name] / total).to(w.dtype) if w.is_floating_point() else sums[name]
            for name, w in weights.items()
        }

    def state_dict(self) -> dict[str, Any]:
        return self._sum.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sum.load_state_dict(state)


class FedAsync(Algorithm):
    """Mixes each update in when it arrives, an old one with a smaller share.

    Args:
        mixing: a, the share of an update without delay, in (0, 1].
        power: b of (1 + d)^-b, 0 or more; 0: delay does not matter.
        extra_steps: optimizer steps of plain training behind the local epochs. With FedADT's number
            of steps this is the control: what its extra compute gives without distillation.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(self, mixing: float = 0.6, power: float = 0.5, extra_steps: int = 0) -> None:
        _check(0 < mixing <= 1, f"mixing must be in (0, 1], not {mixing}")
        _check(power >= 0, f"power must not be negative, not {power}")
        _check(extra_steps >= 0, f"extra_steps must not be negative, not {extra_steps}")
        self.mixing, self.power, self.extra_steps = mixing, power, extra_steps

    def share(self, delay: int) -> float:
        return self.mixing * (1.0 + delay) ** -self.power

    def receive(self, weights: Weights, version: int, update: Update) -> Weights:
        share = self.share(self.delay(version, update))
        # Not w + a (w_client - w): with a = 1 this form is w_client to the bit.
        return {
            name: (1 - share) * w + share * update.weights[name]
            if w.is_floating_point()
            else update.weights[name]
            for name, w in weights.items()
        }


class FedBuff(Algorithm):
    """Adds the mean change of every `buffer` updates, old ones weighted down.

    Args:
        buffer: K, updates in one aggregation.
        server_rate: eta, the factor of their mean change.
        power: b of (1 + d)^-b; the paper's is 0.5.

    Raises:
        ValueError: an argument out of range.
    """

    keeps_base = True

    def __init__(self, buffer: int = 5, server_rate: float = 1.0, power: float = 0.5) -> None:
        _check(buffer >= 1, f"buffer must be at least 1, not {buffer}")
        _check(server_rate > 0, f"server_rate must be above 0, not {server_rate}")
        _check(power >= 0, f"power must not be negative, not {power}")
        self.buffer, self.server_rate, self.power = buffer, server_rate, power
        self._sum = _Sum()

    def share(self, delay: int) -> float:
        return (1.0 + delay) ** -self.power

    def receive(self, weights: Weights, version: int, update: Update) -> Weights | None:
        base = update.base
        assert base is not None
        change = {
            name: w.double() - base[name].double() if w.is_floating_point() else w
            for name, w in update.weights.items()
        }
        self._sum.add(change, self.share(self.delay(version, update)))
        if self._sum.count < self.buffer:
            return None
        rate = self.server_rate / self.buffer
        new = {
            name: (w.double() + rate * self._sum.tensors[name]).to(w.dtype)
            if w.is_floating_point()
            else self._sum.tensors[name]
            for name, w in weights.items()
        }
        self._sum.clear()
        return new

    def state_dict(self) -> dict[str, Any]:
        return self._sum.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sum.load_state_dict(state)


class FedADT(FedAsync):
    """FedAsync whose clients distil from the newest global model before they send.

    A client that has trained from version tau says so; if the server is at t > tau by then, it
    sends w_t, and the client takes `steps` optimizer steps on the loss of distillation.py with the
    teacher w_t and the weight lam(t). The abstract of arXiv 2504.04081 says: the latest global model
    teaches before aggregation, weakly in early stages. The formulas and all numbers are ours.

    Args:
        mixing, power: a and b, see :class:`FedAsync`.
        steps: K, optimizer steps of the correction.
        temperature: T of the softened distributions, above 0.
        lam_max, t_warm: of :class:`StageWeight`; without effect where `schedule` is given.
        schedule: t -> lam in [0, 1], instead.
        delay_from: "base": d counts from tau; "correction": from the teacher's version, as the
            correction has brought the update up to it.

    Raises:
        ValueError: an argument out of range.
    """

    corrects = True

    def __init__(
        self,
        mixing: float = 0.6,
        power: float = 0.5,
        steps: int = 5,
        temperature: float = 2.0,
        lam_max: float = 0.5,
        t_warm: float = 50.0,
        delay_from: str = "base",
        schedule: Callable[[int], float] | None = None,
    ) -> None:
        super().__init__(mixing, power)
        _check(steps >= 0, f"steps must not be negative, not {steps}")
        _check(temperature > 0, f"temperature must be above 0, not {temperature}")
        _check(
            delay_from in DELAYS, f"delay_from must be one of {', '.join(DELAYS)}, not {delay_from}"
        )
        self.steps, self.temperature, self.delay_from = steps, temperature, delay_from
        self.schedule = schedule or StageWeight(lam_max, t_warm)

    def delay(self, version: int, update: Update) -> int:
        base = self.delay_from == "base"
        return version - (update.base_version if base else update.corrected_version)

    def correction(self, version: int, base_version: int) -> Correction:
        steps = self.steps if version > base_version else 0
        return Correction(steps, self.schedule(version), self.temperature)


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


ALGORITHMS: dict[str, type[Algorithm]] = {
    "fedavg": FedAvg,
    "fedasync": FedAsync,
    "fedbuff": FedBuff,
    "fedadt": FedADT,
}
