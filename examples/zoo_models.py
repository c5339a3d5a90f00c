"""Tiny models of many makes, from random weights, offline: each with the inputs of one forward.

Widths are multiples of 32, except where a published design has others. The click models are written out here; those of
the libraries come from their own configuration classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxfp8_recipe.ab.models import build_model
from mxfp8_recipe.ab.types import Batch, FeatureSpec

Inputs = tuple[Any, ...] | dict[str, Any]
Build = Callable[[], tuple[nn.Module, Inputs]]
WIDTH, HEADS, LENGTH, ROWS = 64, 2, 16, 4
VOCABULARY = 96


@dataclass(frozen=True)
class Entry:
    """One model of the zoo; `package` is what it needs besides this one."""

    name: str
    build: Build
    package: str = ""


class DeepFM(nn.Module):
    """Linear part, factorization machine and MLP over the same field embeddings (arXiv:1703.04247)."""

    def __init__(self, fields: int = 8, ids: int = 50, dim: int = 32) -> None:
        super().__init__()
        self.first = nn.EmbeddingBag(fields * ids, 1, mode="sum")
        self.second = nn.Embedding(fields * ids, dim)
        layers: list[nn.Module] = []
        for fan_in, fan_out in ((fields * dim, 128), (128, 64)):
            layers += [nn.Linear(fan_in, fan_out), nn.BatchNorm1d(fan_out), nn.ReLU(inplace=True), nn.Dropout(0.0)]
        self.deep = nn.Sequential(*layers, nn.Linear(64, 1))

    def forward(self, ids: Tensor) -> Tensor:
        embedded = self.second(ids)
        pairs = 0.5 * (embedded.sum(1).square() - embedded.square().sum(1)).sum(1, keepdim=True)
        return self.first(ids) + pairs + self.deep(embedded.flatten(1))


class MMoE(nn.Module):
    """Experts shared by two tasks, each with a softmax gate and a tower (Ma et al., KDD 2018)."""

    def __init__(self, dim: int = 128, experts: int = 4, tasks: int = 2) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(experts)
        )
        self.gates = nn.ModuleList(nn.Linear(dim, experts, bias=False) for _ in range(tasks))
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)) for _ in range(tasks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        seen = torch.stack([expert(x) for expert in self.experts], dim=1)
        mixed = [torch.einsum("be,bed->bd", gate(x).softmax(-1), seen) for gate in self.gates]
        return torch.cat([tower(m) for tower, m in zip(self.towers, mixed)], dim=1)


class HSTUBlock(nn.Module):
    """Pointwise SiLU attention, gated, of one sequence transducer layer (arXiv:2402.17152)."""

    def __init__(self, dim: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.heads, self.dim = heads, dim
        self.norm_in, self.norm_out = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.uvqk = nn.Linear(dim, 4 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        u, v, q, k = F.silu(self.uvqk(self.norm_in(x))).chunk(4, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        weights = F.silu(q @ k.transpose(-1, -2)) / length
        attended = (weights.tril() @ v).transpose(1, 2).flatten(2)
        return x + self.out(u * self.norm_out(attended))


class HSTU(nn.Module):
    """Two blocks over item embeddings and a click head."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(HSTUBlock(), HSTUBlock())
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.items(ids)))


class LSTMTower(nn.Module):
    """The last state of an LSTM over a history, normalized, through a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 128, bias=False), nn.Linear(WIDTH, 128, bias=False)
        self.down = nn.Linear(128, 32, bias=False)
        self.head = nn.Linear(32, 1)

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.lstm(self.items(ids))
        x = self.norm(states[:, -1])
        return self.head(self.down(F.silu(self.gate(x)) * self.up(x)))


def _ids(rows: int = ROWS, length: int = LENGTH) -> Tensor:
    return torch.randint(2, VOCABULARY, (rows, length))


def _encoder(**options: Any) -> Build:
    def build() -> tuple[nn.Module, Inputs]:
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 128, dropout=0.0, batch_first=True, **options)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (torch.randn(ROWS, LENGTH, WIDTH),)

    return build


def _transformer() -> tuple[nn.Module, Inputs]:
    model = nn.Transformer(WIDTH, HEADS, 1, 1, 128, dropout=0.0, batch_first=True)
    return model, (torch.randn(ROWS, LENGTH, WIDTH), torch.randn(ROWS, LENGTH, WIDTH))


def _click_model(name: str) -> Build:
    def build() -> tuple[nn.Module, Inputs]:
        spec = FeatureSpec(num_dense=5, cardinalities=(40, 7, 9), history_field=0, max_history=6, tasks=("ctr", "cvr"))
        lengths = torch.tensor([3, 0, 6, 1])
        labels = torch.randint(0, 2, (ROWS, 2)).float()
        batch = Batch(
            dense=torch.randn(ROWS, 5),
            sparse=torch.stack([torch.randint(0, n, (ROWS,)) for n in spec.cardinalities], 1),
            labels=labels,
            weights=torch.ones_like(labels),
            history=torch.randint(1, 40, (int(lengths.sum()),)),
            history_offsets=torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))),
        )
        return build_model(name, spec), (batch,)

    return build


def _causal(config: str, model: str, **options: Any) -> Build:
    """A language model of transformers, by the names of its classes."""

    def build() -> tuple[nn.Module, Inputs]:
        import transformers

        sizes = {
            "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS,
            "intermediate_size": 128, "max_position_embeddings": 64, "attn_implementation": "sdpa",
            "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "bos_token_id": 0, "eos_token_id": 1,
        }  # fmt: skip
        made = getattr(transformers, model)(getattr(transformers, config)(**(sizes | options)))
        return made, {"input_ids": _ids()}

    return build


def _gpt2() -> tuple[nn.Module, Inputs]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=WIDTH, n_layer=2, n_head=HEADS, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return GPT2LMHeadModel(config), {"input_ids": _ids()}


def _t5(feed_forward: str) -> Build:
    def build() -> tuple[nn.Module, Inputs]:
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(
            vocab_size=VOCABULARY, d_model=WIDTH, d_kv=32, d_ff=128, num_layers=2, num_heads=HEADS, dropout_rate=0.0,
            feed_forward_proj=feed_forward, decoder_start_token_id=0,
        )  # fmt: skip
        return T5ForConditionalGeneration(config), {"input_ids": _ids(), "decoder_input_ids": _ids()}

    return build


def _vit() -> tuple[nn.Module, Inputs]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=128, image_size=32,
        patch_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=10,
    )  # fmt: skip
    return ViTForImageClassification(config), {"pixel_values": torch.randn(ROWS, 3, 32, 32)}


def _lora() -> tuple[nn.Module, Inputs]:
    from peft import LoraConfig, get_peft_model

    model, inputs = _LLAMA()
    config = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj"], lora_dropout=0.0)
    return get_peft_model(model, config), inputs  # pyright: ignore[reportArgumentType]


def _timm(module: str, model: str, **options: Any) -> Build:
    def build() -> tuple[nn.Module, Inputs]:
        import importlib

        made = getattr(importlib.import_module(f"timm.models.{module}"), model)(num_classes=10, **options)
        return made, (torch.randn(ROWS, 3, 32, 32),)

    return build


_LLAMA = _causal("LlamaConfig", "LlamaForCausalLM", num_key_value_heads=1)

ZOO: tuple[Entry, ...] = (
    Entry("nn.TransformerEncoder, post-norm, ReLU", _encoder()),
    Entry("nn.TransformerEncoder, pre-norm, GELU", _encoder(norm_first=True, activation="gelu")),
    Entry("nn.Transformer", _transformer),
    Entry("DLRM", _click_model("dlrm")),
    Entry("DCNv2", _click_model("dcnv2")),
    Entry("gem-small", _click_model("gem-small")),
    Entry("DeepFM", lambda: (DeepFM(), (torch.randint(0, 400, (ROWS, 8)),))),
    Entry("MMoE", lambda: (MMoE(), (torch.randn(ROWS, 128),))),
    Entry("HSTU-style", lambda: (HSTU(), (_ids(),))),
    Entry("LSTM tower", lambda: (LSTMTower(), (_ids(),))),
    Entry("BERT", _causal("BertConfig", "BertForSequenceClassification"), "transformers"),
    Entry("RoBERTa", _causal("RobertaConfig", "RobertaForSequenceClassification", pad_token_id=1), "transformers"),
    Entry("Llama", _LLAMA, "transformers"),
    Entry("Qwen3", _causal("Qwen3Config", "Qwen3ForCausalLM", num_key_value_heads=1, head_dim=32), "transformers"),
    Entry("Gemma", _causal("GemmaConfig", "GemmaForCausalLM", num_key_value_heads=1, head_dim=32), "transformers"),
    Entry(
        "Mixtral",
        _causal("MixtralConfig", "MixtralForCausalLM", num_key_value_heads=1, num_local_experts=4),
        "transformers",
    ),
    Entry("GPT-2", _gpt2, "transformers"),
    Entry("T5", _t5("relu"), "transformers"),
    Entry("T5 v1.1, gated GELU", _t5("gated-gelu"), "transformers"),
    Entry("ViT", _vit, "transformers"),
    Entry(
        "ViT (timm)",
        _timm("vision_transformer", "VisionTransformer", img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=2),
        "timm",
    ),
    Entry(
        "MLP-Mixer (timm)",
        _timm("mlp_mixer", "MlpMixer", img_size=32, patch_size=4, num_blocks=2, embed_dim=64),
        "timm",
    ),
    Entry("ConvNeXt (timm)", _timm("convnext", "ConvNeXt", depths=(1, 1, 1, 1), dims=(32, 64, 64, 64)), "timm"),
    Entry("Llama with LoRA (PEFT)", _lora, "peft"),
)
