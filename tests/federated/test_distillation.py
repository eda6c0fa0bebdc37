"""The correction's loss against a reference by hand in float64, and lam(t) against its formula."""

import math

import pytest
import torch

from lightning_collider.federated.distillation import StageWeight, distillation_loss


def rows(n=7, classes=5):
    generator = torch.Generator().manual_seed(0)
    logits, teacher = (3 * torch.randn(2, n, classes, generator=generator)).double()
    return logits.requires_grad_(), teacher, torch.randint(0, classes, (n,), generator=generator)


def softmax(row, temperature):
    weights = [math.exp(z / temperature) for z in row]
    return [w / sum(weights) for w in weights]


@pytest.mark.parametrize("lam", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_loss_and_gradient_equal_the_formula(lam, temperature):
    logits, teacher, targets = rows()
    loss = distillation_loss(logits, teacher, targets, lam, temperature)
    loss.backward()
    n, t = len(targets), temperature
    want, gradient = 0.0, []
    for z, g, y in zip(logits.tolist(), teacher.tolist(), targets.tolist(), strict=True):
        p, soft_p, soft_q = softmax(z, 1.0), softmax(z, t), softmax(g, t)
        divergence = sum(q * math.log(q / p) for q, p in zip(soft_q, soft_p, strict=True))
        want += ((1 - lam) * -math.log(p[y]) + lam * t**2 * divergence) / n
        # d CE / dz = p - onehot; d T^2 KL / dz = T (p_T - q_T)
        gradient.append(
            [
                ((1 - lam) * (p[c] - (c == y)) + lam * t * (soft_p[c] - soft_q[c])) / n
                for c in range(len(z))
            ]
        )
    assert loss.dtype == torch.float64 and loss.item() == pytest.approx(want, rel=1e-12)
    torch.testing.assert_close(
        logits.grad, torch.tensor(gradient, dtype=torch.float64), rtol=1e-11, atol=1e-14
    )


def test_no_gradient_flows_into_the_teacher():
    logits, teacher, targets = rows()
    distillation_loss(logits, teacher.requires_grad_(), targets, 0.5, 2.0).backward()
    assert teacher.grad is None


def test_lam_follows_its_formula():
    schedule = StageWeight(lam_max=0.8, t_warm=50)
    assert schedule(0) == 0.0
    assert schedule(50) == pytest.approx(0.8 * (1 - 1 / math.e), rel=1e-15)
    assert schedule(7) == pytest.approx(0.8 * (1 - math.exp(-7 / 50)), rel=1e-14)
    assert schedule(10**6) == 0.8
    assert StageWeight(0.3, 0)(0) == 0.3


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: StageWeight(1.1, 1), "lam_max must be in"),
        (lambda: StageWeight(0.5, -1), "t_warm must not be negative"),
        (lambda: distillation_loss(*rows(), 1.2, 1.0), "lam must be in"),
        (lambda: distillation_loss(*rows(), 0.5, 0.0), "the temperature above 0"),
        (
            lambda: distillation_loss(rows()[0], rows()[1][:, 1:], rows()[2], 0.5, 1.0),
            r"shape \(7, 4\), the client's \(7, 5\)",
        ),
    ],
)
def test_mistake_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()
