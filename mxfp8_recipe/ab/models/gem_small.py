"""`gem-small`: a true miniature of a GEM-like ads model, on packed events: nothing is padded.

    history ids -> embedding + age -> [pre-norm self-attention, pre-norm MLP] x layers -> norm
        -> pooled attention (PMA: learned seeds ask, events answer)        (B, seeds, D)
        -> candidate cross-attention (the candidate item asks)             (B, 1, D)
    categorical fields -> embeddings (B, fields, D);  dense -> MLP (B, 1, D)
    all of it, n tokens a row -> interaction layers -> norm -> MLP top -> one head per task

An interaction layer is Wukong's: low-rank factorization machine beside a linear compression of the tokens,
residual around both. Every width of a Linear over features is a multiple of 32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mxfp8_recipe.ab.models.layers import FieldEmbeddings, History, embedding, mlp
from mxfp8_recipe.ab.types import Batch, FeatureSpec
from mxfp8_recipe.modules import CrossAttention, JaggedMultiheadAttention, PooledAttention


@dataclass(frozen=True, kw_only=True)
class GemSmallConfig:
    """Sizes; `width` is the embedding dim and the width of every token."""

    width: int = 64
    heads: int = 2
    history_layers: int = 2
    history_hidden: int = 128
    seeds: int = 2
    interaction_layers: int = 2
    rank: int = 32
    interaction_hidden: int = 128
    top: tuple[int, ...] = (128, 64)


class HistoryBlock(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)), on packed events (T, D)."""

    def __init__(self, config: GemSmallConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = JaggedMultiheadAttention(config.width, config.heads)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.mlp = mlp(config.width, config.history_hidden, config.width, activate_last=False)

    def forward(self, x: Tensor, history: History) -> Tensor:
        x = x + self.attention(self.attention_norm(x), history.offsets, history.max_length)
        return x + self.mlp(self.mlp_norm(x))


class HistoryTower(nn.Module):
    """What a row's history says, alone and about its candidate: (B, seeds + 1, D)."""

    def __init__(self, config: GemSmallConfig, max_history: int) -> None:
        super().__init__()
        self.max_history = max_history
        self.ages = embedding(max_history, config.width)
        self.blocks = nn.ModuleList(HistoryBlock(config) for _ in range(config.history_layers))
        self.norm = nn.RMSNorm(config.width)
        self.pool = PooledAttention(config.width, config.heads, config.seeds)
        self.candidate_norm = nn.RMSNorm(config.width)
        self.cross = CrossAttention(config.width, config.heads)

    def forward(self, items: nn.Embedding, candidate: Tensor, batch: Batch) -> Tensor:
        history = History.of(batch, self.max_history)
        events = items(batch.history) + self.ages(history.ages)
        for block in self.blocks:
            events = block(events, history)
        events = self.norm(events)
        pooled = self.pool(events, history.offsets, history.max_length)
        one_each = torch.arange(candidate.shape[0] + 1, device=candidate.device)
        asking, asked = self.candidate_norm(candidate), (history.offsets, 1, history.max_length)
        about_candidate = self.cross(asking, events, one_each, *asked)
        return torch.cat([pooled, about_candidate[:, None]], dim=1)


class LowRankFM(nn.Module):
    """(B, n, D) -> (B, n, rank): X (X^T Y) with a learned Y (n, rank), all pairwise products at rank cost."""

    def __init__(self, tokens: int, rank: int) -> None:
        super().__init__()
        self.projection = nn.Parameter(torch.randn(tokens, rank) * tokens**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, torch.matmul(x.transpose(1, 2), self.projection))


class InteractionLayer(nn.Module):
    """n tokens in, n out: half from the FM through an MLP, half linear combinations; residual and norm."""

    def __init__(self, config: GemSmallConfig, tokens: int) -> None:
        super().__init__()
        crossed = tokens * config.rank
        self.fm_tokens = -(-tokens // 2)
        self.fm = LowRankFM(tokens, config.rank)
        self.fm_norm = nn.LayerNorm(crossed)
        self.fm_mlp = mlp(crossed, config.interaction_hidden, self.fm_tokens * config.width, activate_last=False)
        self.compress = nn.Linear(tokens, tokens - self.fm_tokens, bias=False) if tokens > 1 else None
        self.norm = nn.LayerNorm(config.width)

    def forward(self, x: Tensor) -> Tensor:
        out = self.fm_mlp(self.fm_norm(self.fm(x).flatten(1))).unflatten(1, (self.fm_tokens, -1))
        if self.compress is not None:
            out = torch.cat([out, self.compress(x.transpose(1, 2)).transpose(1, 2)], dim=1)
        return self.norm(x + out)


class GemSmall(nn.Module):
    """See the module docstring; `forward(batch)` gives logits (B, num_tasks)."""

    def __init__(self, spec: FeatureSpec, config: GemSmallConfig | None = None) -> None:
        super().__init__()
        config = config or GemSmallConfig()
        width = config.width
        self.history_field = spec.history_field
        self.fields = FieldEmbeddings(spec.cardinalities, width)
        self.bottom = mlp(spec.num_dense, width, width) if spec.num_dense else None
        self.tower = None if spec.history_field is None else HistoryTower(config, spec.max_history)
        tokens = len(spec.cardinalities) + (self.bottom is not None)
        tokens += 0 if self.tower is None else config.seeds + 1
        self.interactions = nn.ModuleList(InteractionLayer(config, tokens) for _ in range(config.interaction_layers))
        self.top_norm = nn.LayerNorm(tokens * width)
        self.top = mlp(tokens * width, *config.top)
        self.heads = nn.ModuleDict({task: mlp(config.top[-1], 32, 1, activate_last=False) for task in spec.tasks})

    def forward(self, batch: Batch) -> Tensor:
        x = self.tokens(batch)
        for layer in self.interactions:
            x = layer(x)
        shared = self.top(self.top_norm(x.flatten(1)))
        return torch.cat([head(shared) for head in self.heads.values()], dim=1)

    def tokens(self, batch: Batch) -> Tensor:
        """(B, n, width): fields, then dense, then history."""
        fields = self.fields(batch.sparse)
        parts = [fields]
        if self.bottom is not None:
            parts.append(self.bottom(batch.dense)[:, None])
        if self.tower is not None and self.history_field is not None:
            items = self.fields.tables[self.history_field]
            parts.append(self.tower(items, fields[:, self.history_field], batch))
        return torch.cat(parts, dim=1)


def build(spec: FeatureSpec) -> nn.Module:
    """The model `gem-small` for data of `spec`."""
    return GemSmall(spec)
