"""`dlrm`: bottom MLP, embeddings, pairwise dot products, top MLP (Naumov et al. 2019, arXiv:1906.00091).

A history enters as the mean of its event embeddings. The dot products are padded with zero features to a
whole 32 before the top MLP, as is usual where GEMM kernels need it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mxfp8_recipe.ab.models.layers import FieldEmbeddings, HistoryMean, mlp, pad_features, round_up_32
from mxfp8_recipe.ab.types import Batch, FeatureSpec


class DLRM(nn.Module):
    """`forward(batch)` gives logits (B, num_tasks)."""

    pairs: Tensor

    def __init__(self, spec: FeatureSpec, *, dim: int = 64, top: tuple[int, ...] = (256, 128)) -> None:
        super().__init__()
        self.history_field = spec.history_field
        self.fields = FieldEmbeddings(spec.cardinalities, dim)
        self.bottom = mlp(spec.num_dense, 128, dim) if spec.num_dense else None
        self.history_mean = None if spec.history_field is None else HistoryMean()
        vectors = len(spec.cardinalities) + (self.bottom is not None) + (self.history_mean is not None)
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, offset=-1), persistent=False)
        self.top_width = round_up_32(max(1, self.pairs.shape[1] + (dim if self.bottom is not None else 0)))
        self.top = mlp(self.top_width, *top, len(spec.tasks), activate_last=False)

    def forward(self, batch: Batch) -> Tensor:
        vectors = [self.fields(batch.sparse)]
        dense = None if self.bottom is None else self.bottom(batch.dense)
        if dense is not None:
            vectors.append(dense[:, None])
        if self.history_mean is not None and self.history_field is not None:
            vectors.append(self.history_mean(self.fields.tables[self.history_field].weight, batch))
        x = torch.cat(vectors, dim=1)
        dots = torch.matmul(x, x.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        features = dots if dense is None else torch.cat([dense, dots], dim=1)
        return self.top(pad_features(features, self.top_width))


def build(spec: FeatureSpec) -> nn.Module:
    """The model `dlrm` for data of `spec`."""
    return DLRM(spec)
