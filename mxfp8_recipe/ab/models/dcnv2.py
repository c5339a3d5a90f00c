"""`dcnv2`: a cross network beside a deep one (Wang et al. 2021, arXiv:2008.13535).

    x0 = [embeddings, history mean, dense];  x_{l+1} = x0 * (W_l x_l + b_l) + x_l
    logits = head([x_L, MLP(x0)])

x0 is padded with zero features to a whole 32, so that every W is a square a GEMM kernel can take.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mxfp8_recipe.ab.models.layers import FieldEmbeddings, HistoryMean, mlp, pad_features, round_up_32
from mxfp8_recipe.ab.types import Batch, FeatureSpec


class CrossNetwork(nn.Module):
    """(B, width) -> (B, width): full-rank crosses, one degree more a layer."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x0: Tensor) -> Tensor:
        x = x0
        for layer in self.layers:
            x = x0 * layer(x) + x
        return x


class DCNv2(nn.Module):
    """`forward(batch)` gives logits (B, num_tasks)."""

    def __init__(
        self, spec: FeatureSpec, *, dim: int = 32, cross_layers: int = 3, deep: tuple[int, ...] = (256, 128)
    ) -> None:
        super().__init__()
        self.history_field = spec.history_field
        self.fields = FieldEmbeddings(spec.cardinalities, dim)
        self.history_mean = None if spec.history_field is None else HistoryMean()
        vectors = len(spec.cardinalities) + (self.history_mean is not None)
        self.width = round_up_32(vectors * dim + spec.num_dense)
        self.cross = CrossNetwork(self.width, cross_layers)
        self.deep = mlp(self.width, *deep)
        self.head = nn.Linear(self.width + deep[-1], len(spec.tasks))

    def forward(self, batch: Batch) -> Tensor:
        parts = [self.fields(batch.sparse).flatten(1), batch.dense]
        if self.history_mean is not None and self.history_field is not None:
            parts.append(self.history_mean(self.fields.tables[self.history_field].weight, batch).flatten(1))
        x0 = pad_features(torch.cat(parts, dim=1), self.width)
        return self.head(torch.cat([self.cross(x0), self.deep(x0)], dim=1))


def build(spec: FeatureSpec) -> nn.Module:
    """The model `dcnv2` for data of `spec`."""
    return DCNv2(spec)
