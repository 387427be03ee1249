"""Packed layers compute what the layers they replace compute."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from inference.engine.transformers import TransformersEngine, packing
from inference.engine.transformers.packing import PackedLinear, pack_linear_layers
from tests.engine.rig import Rig, tiny_config

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="this processor or build has no oneDNN for bfloat16",
)


class Adapted(nn.Linear):
    """A subclass, as quantised layers and those with adapters are."""


def model_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    inner = nn.Sequential(nn.Linear(96, 160), nn.SiLU(), nn.Linear(160, 64, bias=False))
    return nn.Sequential(nn.Embedding(10, 96), inner, Adapted(64, 32)).to(dtype).requires_grad_(False)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("shape", [(1,), (1, 7), (2, 300)])
def test_computes_the_same(dtype: torch.dtype, tolerance: float, shape: tuple[int, ...]) -> None:
    model = model_of(dtype)
    ids = torch.arange(torch.Size(shape).numel()).reshape(shape) % 10
    with torch.inference_mode():
        expected = model(ids)
        assert pack_linear_layers(model) == 2
        found = model(ids)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("inputs", "outputs", "fewest"), [(576, 1536, 1), (1536, 576, 2)])
def test_a_row_does_not_depend_on_the_rows_beside_it(inputs: int, outputs: int, fewest: int) -> None:
    """In float32 an answer is the same alone and under load; the layers must not be what breaks it."""
    torch.manual_seed(4)
    layer = PackedLinear(nn.Linear(inputs, outputs).requires_grad_(False))
    rows = torch.randn(32, inputs)
    with torch.inference_mode():
        together = layer(rows)
        for count in range(fewest, 32):
            assert torch.equal(layer(rows[:count]), together[:count])
        torch.testing.assert_close(layer(rows[:1]), together[:1], atol=1e-5, rtol=1e-5)


def test_replaces_only_what_it_can() -> None:
    model = model_of(torch.float16)
    assert pack_linear_layers(model) == 0
    model = model_of(torch.float32)
    assert pack_linear_layers(model) == 2
    assert isinstance(model[2], Adapted)
    assert pack_linear_layers(model) == 0
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "2.weight", "2.bias"]


def test_none_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert pack_linear_layers(model_of(torch.float32)) == 0


def test_layers_that_share_a_weight_with_the_embedding() -> None:
    """An output layer tied to the embedding: the embedding stays as it is."""
    embedding, out = nn.Embedding(50, 64), nn.Linear(64, 50, bias=False)
    out.weight = embedding.weight
    model = nn.Sequential(embedding, out).requires_grad_(False)
    ids = torch.arange(5)
    with torch.inference_mode():
        expected, vectors = model(ids), embedding(ids).clone()
        assert pack_linear_layers(model) == 1
        torch.testing.assert_close(model(ids), expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(embedding(ids), vectors)


def test_weights_go_as_soon_as_they_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, all of them stayed until the last was packed: loading took twice the memory of the model."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(5)))
    weights = [weakref.ref(module.weight) for module in model.modules() if isinstance(module, nn.Linear)]
    alive: list[int] = []

    class Counting(PackedLinear):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__(linear)
            alive.append(sum(weight() is not None for weight in weights))

    monkeypatch.setattr(packing, "PackedLinear", Counting)
    assert pack_linear_layers(model) == 10
    assert alive == list(range(10, 0, -1))
    assert not any(weight() is not None for weight in weights)


async def test_the_engine_packs_its_model(tiny_folder: str) -> None:
    rig = Rig(TransformersEngine(tiny_folder, alias="tiny", device="cpu", config=tiny_config()))
    try:
        await rig.load()
        kinds = {type(module) for module in rig.engine._loaded.model.modules()}
        assert PackedLinear in kinds and nn.Linear not in kinds
    finally:
        await rig.engine.close()
