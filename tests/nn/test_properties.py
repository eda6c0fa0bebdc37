"""Drawn cases: compact flow, scatter and the oracle agree on every model, batch and mask."""

from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lightning_collider as lc
from lightning_collider.filtering.state import FilterState
from lightning_collider.nn.segments import separate_documents
from tests.conftest import (
    CONFIGS,
    batch_of,
    float64_reference,
    grads_of,
    relative_error,
    small_model,
)


@dataclass(frozen=True)
class Case:
    family: str
    layers: int
    heads: tuple[int, int]  # query heads, key heads
    tied: bool
    batch: int
    length: int
    pattern: str
    layout: str  # plain, padding on one side, or documents by positions or by ids
    dtype: torch.dtype
    holes: float
    checkpointing: bool
    micro_batches: int
    seed: int


PATTERNS = ("random", "prefix", "suffix", "runs", "one", "none", "all")
CASES = st.builds(
    Case,
    family=st.sampled_from(sorted(CONFIGS)),
    layers=st.integers(1, 3),
    heads=st.sampled_from([(4, 4), (4, 2), (8, 2), (4, 1)]),
    tied=st.booleans(),
    batch=st.integers(1, 3),
    length=st.integers(1, 40),
    pattern=st.sampled_from(PATTERNS),
    layout=st.sampled_from(["plain", "plain", "left", "right", "positions", "document_ids"]),
    dtype=st.sampled_from([torch.float64, torch.float64, torch.float32, torch.bfloat16]),
    holes=st.sampled_from([0.0, 0.3, 1.0]),
    checkpointing=st.booleans(),
    micro_batches=st.integers(1, 2),
    seed=st.integers(0, 2**16),
)


def draw_mask(case: Case, generator: torch.Generator) -> torch.Tensor:
    shape = (case.batch, case.length)
    position = torch.arange(case.length)
    border = torch.randint(0, case.length + 1, (case.batch, 1), generator=generator)
    if case.pattern == "random":
        return torch.rand(shape, generator=generator) < 0.6
    if case.pattern == "prefix":
        return position < border
    if case.pattern == "suffix":
        return position >= border
    if case.pattern == "runs":
        return ((position + border) // 5 % 2 == 0).expand(shape).clone()
    if case.pattern == "one":
        chosen = torch.randint(0, case.batch * case.length, (1,), generator=generator)
        return (torch.arange(case.batch * case.length) == chosen).view(shape)
    return torch.full(shape, case.pattern == "all")


def draw_layout(case: Case, generator: torch.Generator) -> dict:
    """Inputs beside the ids."""
    shape = (case.batch, case.length)
    if case.layout == "plain":
        return {}
    cut = torch.randint(1, case.length + 1, (case.batch, 1), generator=generator)
    position = torch.arange(case.length)
    if case.layout == "positions":
        return {"position_ids": torch.where(position < cut, position, position - cut).expand(shape)}
    if case.layout == "document_ids":
        return {"document_ids": (position < cut).expand(shape).long()}
    tokens = position < cut if case.layout == "right" else position >= case.length - cut
    return {"attention_mask": tokens.expand(shape).long()}


def micro_batches(case: Case):
    for i in range(case.micro_batches):
        generator = torch.Generator().manual_seed(case.seed + i)
        ids, labels = batch_of(case.batch, case.length, seed=case.seed + i, holes=case.holes)
        inputs = draw_layout(case, generator)
        yield ids, labels, draw_mask(case, generator), inputs


def ours(model, case: Case, compact: bool) -> dict[str, torch.Tensor]:
    """Accumulated gradients of the sums over kept rows."""
    model.zero_grad()
    with patch.object(FilterState, "compact_flow", compact):
        for ids, labels, keep, inputs in micro_batches(case):
            loss = lc.token_losses(model, ids, labels, **inputs).sum()
            lc.backward_filter(loss, keep)
            loss.backward()
    return grads_of(model)


def oracles(model, case: Case) -> dict[str, torch.Tensor]:
    total: dict[str, torch.Tensor] = {}
    for ids, labels, keep, inputs in micro_batches(case):
        if "document_ids" in inputs:
            positions, labels = separate_documents(inputs["document_ids"], labels)
            inputs = {"position_ids": positions}
        if "attention_mask" in inputs:  # what padding would predict is no target
            labels[:, 1:][inputs["attention_mask"][:, :-1] == 0] = -100
        grads = lc.oracle.filtered_grads(model, ids, labels, keep, "sum", **inputs)
        total = {name: total.get(name, 0) + grad for name, grad in grads.items()}
    return total


def check(case: Case) -> None:
    query_heads, key_heads = case.heads
    model = small_model(
        case.family,
        layers=case.layers,
        num_attention_heads=query_heads,
        num_key_value_heads=key_heads,
        hidden_size=8 * query_heads,
        tie_word_embeddings=case.tied and case.family != "phi",
    )
    want = oracles(float64_reference(model), case)
    model = lc.convert(model.to(case.dtype))
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    compact, scattered = ours(model, case, True), ours(model, case, False)
    assert all(g.isfinite().all() for g in compact.values())
    assert all(grad.equal(scattered[name]) for name, grad in compact.items())
    if case.dtype != torch.bfloat16:  # tests/nn/test_gradients.py holds it to Hugging Face's error
        tolerance = 1e-10 if case.dtype == torch.float64 else 1e-4
        assert relative_error(compact, want) < tolerance


def drawn(n: int):
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=n, deadline=None, database=None, suppress_health_check=quiet)


@drawn(200)
@given(CASES)
def test_compact_scatter_and_oracle_agree(case):
    check(case)


@pytest.mark.slow
@drawn(1000)
@given(CASES)
def test_a_thousand_cases_agree(case):
    check(case)
