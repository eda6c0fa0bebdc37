"""Asynchronous federated training of a LightningModule, on Flower.

Sites with different data and speeds train one model. `algorithms` says how the server takes in what
a client sends, `distillation` how a client corrects a stale update. `client` and `server` are the
two ends of the exchange, in Flower's messages; `simulator` and `flower` are the two ways to run
them: on a simulated clock, and as Flower apps.

Only the algorithms are imported here: the rest needs the extra `lightning-collider[federated]`.
"""

from lightning_collider.federated.algorithms import FedADT, FedAsync, FedAvg, FedBuff

__all__ = ["FedADT", "FedAsync", "FedAvg", "FedBuff"]
