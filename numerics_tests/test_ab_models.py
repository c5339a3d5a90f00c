"""The CTR models: shapes, gradients, independence of rows, empty histories, one graph under torch.compile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mxfp8_recipe.ab.data import DataError
from mxfp8_recipe.ab.models import MODELS, build_model
from mxfp8_recipe.ab.models.layers import History
from mxfp8_recipe.ab.types import Batch, FeatureSpec

FULL = FeatureSpec(num_dense=5, cardinalities=(40, 7, 9), history_field=0, max_history=6, tasks=("ctr", "cvr"))
SPECS = {
    "full": FULL,
    "no history": replace(FULL, history_field=None, max_history=0),
    "no dense": replace(FULL, num_dense=0),
    "one task": replace(FULL, tasks=("ctr",)),
    "dense only": FeatureSpec(num_dense=5, cardinalities=()),
    "history only": FeatureSpec(num_dense=0, cardinalities=(40,), history_field=0, max_history=6),
}


def make_batch(spec: FeatureSpec, lengths: list[int], seed: int = 0) -> Batch:
    g = torch.Generator().manual_seed(seed)
    rows = len(lengths)
    columns = [torch.randint(0, n, (rows,), generator=g) for n in spec.cardinalities]
    labels = torch.randint(0, 2, (rows, len(spec.tasks)), generator=g).float()
    history = offsets = None
    if spec.history_field is not None:
        history = torch.randint(1, spec.cardinalities[spec.history_field], (sum(lengths),), generator=g)
        offsets = torch.tensor([0, *lengths]).cumsum(0)
    return Batch(
        dense=torch.randn(rows, spec.num_dense, generator=g),
        sparse=torch.stack(columns, dim=1) if columns else torch.zeros(rows, 0, dtype=torch.int64),
        labels=labels,
        weights=torch.ones_like(labels),
        history=history,
        history_offsets=offsets,
    )


def make_model(name: str, spec: FeatureSpec, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build_model(name, spec)


def backward(model: nn.Module, batch: Batch) -> torch.Tensor:
    model.zero_grad()
    logits = model(batch)
    F.binary_cross_entropy_with_logits(logits, batch.labels).backward()
    return logits.detach()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_learns(name, spec):
    model = make_model(name, spec)
    batch = make_batch(spec, [0, 6, 1, 3, 6, 2, 0, 4])
    logits = backward(model, batch)
    assert logits.shape == (8, len(spec.tasks))
    assert logits.dtype == torch.float32
    for fqn, parameter in model.named_parameters():
        assert parameter.grad is not None, fqn
        assert parameter.grad.isfinite().all(), fqn
        assert parameter.grad.abs().max() > 0, fqn


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lengths", [[0, 0, 0], [0], [6], [0, 6, 0], [1, 0, 0]])
def test_empty_histories_give_finite_logits_and_gradients(name, lengths):
    model = make_model(name, FULL)
    logits = backward(model, make_batch(FULL, lengths))
    assert logits.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_a_row_sees_no_other_rows_history(name):
    model = make_model(name, FULL)
    batch = make_batch(FULL, [2, 6, 0, 3, 5, 1])
    other = batch.history.clone()
    other[2:8] = 1 + (other[2:8] + 17) % 39
    with torch.no_grad():
        before, after = model(batch), model(replace(batch, history=other))
    keep = [0, 2, 3, 4, 5]
    assert torch.equal(before[keep], after[keep])
    assert not torch.equal(before[1], after[1])


@pytest.mark.parametrize("name", MODELS)
def test_a_row_alone_equals_the_row_in_a_batch(name):
    """Other rows' history lengths move its events in the packed tensor; only the GEMM's blocking may differ."""
    model = make_model(name, FULL)
    lengths = [2, 6, 0, 3]
    batch = make_batch(FULL, lengths)
    with torch.no_grad():
        together = model(batch)
        for row in range(4):
            start, stop = batch.history_offsets[row], batch.history_offsets[row + 1]
            alone = Batch(
                dense=batch.dense[row : row + 1],
                sparse=batch.sparse[row : row + 1],
                labels=batch.labels[row : row + 1],
                weights=batch.weights[row : row + 1],
                history=batch.history[start:stop],
                history_offsets=torch.tensor([0, lengths[row]]),
            )
            torch.testing.assert_close(model(alone), together[row : row + 1], rtol=1e-5, atol=1e-5)


def test_gem_small_reads_the_order_and_the_candidate():
    model = make_model("gem-small", FULL)
    batch = make_batch(FULL, [6])
    with torch.no_grad():
        logits = model(batch)
        assert (model(replace(batch, history=batch.history.flip(0))) - logits).abs().max() > 1e-5
        pooled_only = model.tokens(batch)[:, -3:]
        moved = model.tokens(replace(batch, sparse=(batch.sparse + 1) % 7))[:, -3:]
    assert torch.equal(pooled_only[:, :2], moved[:, :2])
    assert (pooled_only[:, 2] - moved[:, 2]).abs().max() > 1e-5


def test_gem_small_is_the_architecture_with_eligible_linears():
    model = make_model("gem-small", FULL)
    names = [n for n, _ in model.named_modules()]
    for part in ("tower.blocks.0.attention", "tower.pool", "tower.cross", "interactions.0.fm", "top", "heads.cvr"):
        assert part in names
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    narrow = {n for n, m in linears.items() if m.in_features % 32 or m.out_features % 32}
    assert narrow == {"bottom.0", "interactions.0.compress", "interactions.1.compress", "heads.ctr.2", "heads.cvr.2"}
    assert len(linears) - len(narrow) >= 18


def test_ages_count_from_the_newest():
    batch = make_batch(FULL, [3, 0, 2])
    assert History.of(batch, 4).ages.tolist() == [2, 1, 0, 1, 0]


@pytest.mark.parametrize("name", MODELS)
def test_one_graph_under_compile_equal_to_eager(name):
    torch._dynamo.reset()
    model = make_model(name, FULL)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for lengths in ([2, 6, 0, 3], [1, 1, 5, 4, 0, 0]):
        batch = make_batch(FULL, lengths)
        eager = backward(model, batch)
        grads = [p.grad.clone() for p in model.parameters()]
        assert torch.equal(backward(compiled, batch), eager)
        assert all(torch.equal(g, p.grad) for g, p in zip(grads, model.parameters(), strict=True))


def test_the_same_seed_builds_the_same_weights():
    first, second = make_model("gem-small", FULL), make_model("gem-small", FULL)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert set(first.state_dict()) == {n for n, _ in first.named_parameters()}


def test_dcnv2_crosses_as_written():
    model = make_model("dcnv2", FULL)
    x0 = torch.randn(3, model.width)
    x = x0
    for layer in model.cross.layers:
        x = x0 * (x @ layer.weight.T + layer.bias) + x
    torch.testing.assert_close(model.cross(x0), x)


def test_dlrm_dots_every_pair_once():
    model = make_model("dlrm", FULL)
    vectors = len(FULL.cardinalities) + 2
    pairs = {tuple(sorted(p)) for p in model.pairs.T.tolist()}
    assert len(pairs) == model.pairs.shape[1] == vectors * (vectors - 1) // 2


def test_unknown_model_names_the_choices_and_the_near_miss():
    with pytest.raises(DataError, match=r"got 'gem_smal'.*gem-small, dlrm, dcnv2, module:function.*mean 'gem-small'"):
        build_model("gem_smal", FULL)


def test_a_model_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_ctr_model.py").write_text(
        "from torch import nn\n"
        "def build(spec):\n    return nn.Linear(spec.num_dense, 1)\n"
        "def wrong(spec):\n    return 3\n"
    )
    assert build_model("own_ctr_model:build", FULL).in_features == 5
    with pytest.raises(DataError, match="it returned int"):
        build_model("own_ctr_model:wrong", FULL)
    with pytest.raises(DataError, match=r"no 'buidl'; did you mean build"):
        build_model("own_ctr_model:buidl", FULL)
    with pytest.raises(DataError, match="no module 'no_such_module'"):
        build_model("no_such_module:build", FULL)


def test_a_bad_spec_is_one_error_with_every_field():
    spec = FeatureSpec(num_dense=-1, cardinalities=(0,), history_field=3, tasks=())
    with pytest.raises(DataError, match=r"num_dense.*cardinalities.*history_field.*max_history.*tasks"):
        build_model("dlrm", spec)


def test_missing_history_is_said():
    model = make_model("gem-small", FULL)
    with pytest.raises(ValueError, match="history: the batch has none"):
        model(replace(make_batch(FULL, [1, 2]), history=None))
