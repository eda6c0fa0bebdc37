"""torch.compile breaks the graph around the filtered forward: never a wrong gradient."""

import pytest
import torch

import lightning_collider as lc
from tests.conftest import (
    batch_of,
    float64_reference,
    grads_of,
    random_keep,
    relative_error,
    small_llama,
)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_compiled_model_honours_each_mask():
    model = small_llama(layers=1)
    reference = float64_reference(model)
    model = lc.convert(model.double())
    compiled = torch.compile(model)
    ids, labels = batch_of(2, 17)
    for seed in (1, 2):  # the second mask must not be the first's
        keep = random_keep(2, 17, seed=seed)
        want = lc.oracle.filtered_grads(reference, ids, labels, keep, "sum")
        model.zero_grad()
        loss = compiled(input_ids=ids, labels=labels).token_losses.sum()
        lc.backward_filter(loss, keep)
        loss.backward()
        assert relative_error(grads_of(model), want) < 1e-10
