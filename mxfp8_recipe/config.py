"""What a user may say about precision: frozen, validated, and the same in code and in YAML.

A `Recipe` names the quantization of every GEMM operand of every kind of layer; an *override* changes it
for some layers: `"bf16"`, the name of another recipe, or a partial mapping such as `{"wgrad": "bf16"}`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError, model_validator

from .fused.attention.spec import ALONG_SEQUENCE, GEMMS, AttentionSpec
from .fused.spec import QuantSpec, near_misses

BF16 = "bf16"


def _parse_spec(value: Any) -> QuantSpec:
    if isinstance(value, QuantSpec):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"got {value!r}, expected a mapping of {', '.join(QuantSpec().to_dict())}")
    return QuantSpec.from_dict(dict(value))


Spec = Annotated[QuantSpec, BeforeValidator(_parse_spec), PlainSerializer(QuantSpec.to_dict)]


class Frozen(BaseModel):
    """Base of every config: immutable, hashable, and a field nobody declared is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class GemmPrecision(Frozen):
    """Both operands of one GEMM in MXFP8. Subclasses name the operands; `bf16` stands for leaving the GEMM alone."""

    @property
    def operands(self) -> tuple[QuantSpec, QuantSpec]:
        """The two specs in declaration order."""
        first, second = (getattr(self, name) for name in type(self).model_fields)
        return first, second

    @model_validator(mode="after")
    def _same_rotation(self) -> GemmPrecision:
        first, second = self.operands
        if first.hadamard != second.hadamard:
            names = " and ".join(type(self).model_fields)
            raise ValueError(
                f"hadamard: got {first.hadamard} and {second.hadamard} for {names}, expected the same on both "
                "operands, or the rotations do not cancel"
            )
        return self


class FpropPrecision(GemmPrecision):
    """`output = input @ weight.T`, contracting over in_features."""

    input: Spec = QuantSpec()
    weight: Spec = QuantSpec()


class DgradPrecision(GemmPrecision):
    """`grad_input = grad_output @ weight`, contracting over out_features."""

    grad_output: Spec = QuantSpec()
    weight: Spec = QuantSpec()


class WgradPrecision(GemmPrecision):
    """`grad_weight = grad_output.T @ input`, contracting over tokens."""

    grad_output: Spec = QuantSpec()
    input: Spec = QuantSpec()


class LinearPrecision(Frozen):
    """Precision of the three GEMMs of a linear layer. `bf16` runs a GEMM in the dtype the layer would have used."""

    fprop: FpropPrecision | Literal["bf16"] = FpropPrecision()
    dgrad: DgradPrecision | Literal["bf16"] = DgradPrecision()
    wgrad: WgradPrecision | Literal["bf16"] = WgradPrecision()

    @property
    def is_bf16(self) -> bool:
        return self.fprop == self.dgrad == self.wgrad == BF16

    @property
    def mixes_tokens(self) -> bool:
        """A tile of an activation or a gradient spans several rows, so one token's value moves another's scale."""
        forward = self.fprop != BF16 and self.fprop.input.tile[0] > 1
        backward = self.dgrad != BF16 and self.dgrad.grad_output.tile[0] > 1
        return forward or backward


class QKPrecision(GemmPrecision):
    """`scores = query @ key.T`, contracting over the head dim."""

    query: Spec = QuantSpec()
    key: Spec = QuantSpec()


class PVPrecision(GemmPrecision):
    """`output = probs @ value`, contracting over keys; probs take the fixed scale 2**-8, whatever the tile."""

    probs: Spec = QuantSpec()
    value: Spec = QuantSpec()


class DVPrecision(GemmPrecision):
    """`grad_value = probs.T @ grad_output`, contracting over queries; probs as in `pv`."""

    probs: Spec = QuantSpec()
    grad_output: Spec = QuantSpec()


class DPPrecision(GemmPrecision):
    """`grad_probs = grad_output @ value.T`, contracting over the head dim."""

    grad_output: Spec = QuantSpec()
    value: Spec = QuantSpec()


class DQPrecision(GemmPrecision):
    """`grad_query = grad_scores @ key`, contracting over keys."""

    grad_scores: Spec = QuantSpec()
    key: Spec = QuantSpec()


class DKPrecision(GemmPrecision):
    """`grad_key = grad_scores.T @ query`, contracting over queries."""

    grad_scores: Spec = QuantSpec()
    query: Spec = QuantSpec()


class AttentionPrecision(Frozen):
    """Precision of softmax attention: six GEMMs, and the projections of a layer that owns them.

    Attributes:
        qk, pv, dv, dp, dq, dk: the GEMMs; `bf16` runs one in the dtype the layer would have used.
        mix_masked: let tiles of several rows, and blocks along the sequence, span positions that a mask hides from
            each other. Without it such tiles are refused under a mask, and such blocks are left to BF16.
        projections: of a layer that owns its input and output projections; None takes the recipe's `linear`.
    """

    qk: QKPrecision | Literal["bf16"] = QKPrecision()
    pv: PVPrecision | Literal["bf16"] = PVPrecision()
    dv: DVPrecision | Literal["bf16"] = DVPrecision()
    dp: DPPrecision | Literal["bf16"] = DPPrecision()
    dq: DQPrecision | Literal["bf16"] = DQPrecision()
    dk: DKPrecision | Literal["bf16"] = DKPrecision()
    mix_masked: bool = False
    projections: LinearPrecision | Literal["bf16"] | None = None

    @property
    def spec(self) -> AttentionSpec:
        """The GEMMs as the ops take them."""
        pairs = {name: None if getattr(self, name) == BF16 else getattr(self, name).operands for name in GEMMS}
        return AttentionSpec(**pairs, mix_masked=self.mix_masked)

    @property
    def is_bf16(self) -> bool:
        return self.spec.is_high and self.projections in (None, BF16)

    @property
    def mixes_tokens(self) -> bool:
        """A tile spans several queries or keys, so one token's value moves another's scale."""
        linear = self.projections
        return self.spec.mixes_rows or (isinstance(linear, LinearPrecision) and linear.mixes_tokens)

    @model_validator(mode="after")
    def _no_rotation_along_the_sequence(self) -> AttentionPrecision:
        rotated = [n for n in ALONG_SEQUENCE if getattr(self, n) != BF16 and getattr(self, n).operands[0].hadamard]
        if rotated:
            raise ValueError(
                f"hadamard: got one for {', '.join(rotated)}, expected null: it would rotate tokens into each other "
                "and probs out of [0, 1]; rotate qk and dp, which contract over the head dim"
            )
        return self


class ProducerPrecision(Frozen):
    """What a norm or an activation hands on where its readers allow it: MXFP8 per their own input specs."""

    output: Literal["mxfp8"] = "mxfp8"


KIND_PRECISION: dict[str, type[Frozen]] = {
    "linear": LinearPrecision,
    "attention": AttentionPrecision,
    "norm": ProducerPrecision,
    "activation": ProducerPrecision,
}
"""Layer kinds a recipe speaks of, and the class that holds each kind's precision."""

Override = str | dict[str, Any]


class Recipe(Frozen):
    """A named assignment of precision to a model's layers.

    Attributes:
        name, description, source: what it is and whose experience it rests on.
        linear: precision of linear layers, or `bf16`.
        attention: precision of softmax attention, or `bf16`.
        norm, activation: whether these run fused kernels that hand MXFP8 on, or stay as they are (`bf16`).
        fuse: whether values travel quantized between layers. Off, the same kernels store their output in high
            precision; the bits are the same.
        rules: the recipe's own overrides, pattern to override, applied before the user's.
            A rule of a recipe may match nothing.
        bf16_last_fraction: share of the linear layers, counted from the model's end, that stay BF16.
        gpu_min_features: a linear layer with fewer in_features or out_features stays BF16 on a GPU backend,
            where it is too small to gain. The reference backend skips nothing for size.
    """

    name: str
    description: str = ""
    source: str = ""
    linear: LinearPrecision | Literal["bf16"] = LinearPrecision()
    attention: AttentionPrecision | Literal["bf16"] = AttentionPrecision()
    norm: ProducerPrecision | Literal["bf16"] = ProducerPrecision()
    activation: ProducerPrecision | Literal["bf16"] = ProducerPrecision()
    fuse: bool = True
    rules: dict[str, Override] = Field(default_factory=dict)
    bf16_last_fraction: float = Field(default=0.0, ge=0.0, le=1.0)
    gpu_min_features: int = Field(default=128, ge=0)

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def converts_something(self) -> bool:
        """Whether the recipe by itself converts any kind of layer."""
        return any(getattr(self, kind) != BF16 for kind in KIND_PRECISION)

    @property
    def digest(self) -> str:
        """SHA-256 of everything that affects numerics."""
        content = self.model_dump(mode="json", exclude={"name", "description", "source"})
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def precision(self, kind: str) -> Any:
        """Precision of a layer kind: an instance of `KIND_PRECISION[kind]` or `"bf16"`.

        That of attention has its projections filled in.
        """
        precision = getattr(self, kind)
        if kind != "attention" or (precision != BF16 and precision.projections is not None):
            return precision
        gemms: dict[str, Any] = dict.fromkeys(GEMMS, BF16) if precision == BF16 else dict(precision)
        filled = AttentionPrecision.model_validate(gemms | {"projections": self.linear})
        return BF16 if filled.is_bf16 else filled

    def to_transformer_engine(self) -> Any:
        """The `transformer_engine.common.recipe.MXFP8BlockScaling` that rounds as this recipe's linear layers do.

        Raises:
            ValueError: for what TransformerEngine cannot say. ImportError: without TransformerEngine.
        """
        from .te_interop import te_recipe

        return te_recipe(self)


Config = TypeVar("Config", bound=Frozen)


def validate(cls: type[Config], values: Mapping[str, Any], where: str) -> Config:
    """`cls` from a mapping; every bad field at once, in one ValueError that says where, got, expected, remedy."""
    try:
        return cls.model_validate(dict(values))
    except ValidationError as error:
        raise ValueError(f"{where}: {explain(error, cls)}") from None


def explain(error: ValidationError, cls: type[BaseModel]) -> str:
    """Pydantic's findings as one line, with near misses for unknown fields."""
    findings = {}
    for item in error.errors():
        path = [str(part) for part in item["loc"] if not _is_union_tag(part)]
        name = ".".join(path) or "value"
        if item["type"] == "extra_forbidden":
            known = _fields_at(cls, path[:-1])
            findings[name] = f"{name}: unknown field{near_misses(path[-1], known)}; fields are {', '.join(known)}"
        elif item["type"] == "literal_error" and (isinstance(item["input"], Mapping) or name in findings):
            continue  # the other arm of "bf16 or a mapping" has said it
        elif item["type"] == "model_type":
            findings[name] = f"{name}: got {item['input']!r}, expected 'bf16' or a mapping"
        else:
            message = item["msg"].removeprefix("Value error, ")
            got = "" if "got " in message or item["type"] == "missing" else f" (got {item['input']!r})"
            findings.setdefault(name, f"{name}: {message}{got}")
    return "; ".join(findings.values())


def _is_union_tag(part: Any) -> bool:
    return isinstance(part, str) and ("Precision" in part or part.startswith("literal["))


def _fields_at(cls: type[BaseModel], path: list[str]) -> list[str]:
    for part in path:
        annotation = cls.model_fields[part].annotation
        models = [a for a in (annotation, *get_args(annotation)) if isinstance(a, type) and issubclass(a, BaseModel)]
        if not models:
            return []
        cls = models[0]
    return list(cls.model_fields)


def merge(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """`patch` laid over `base`, mapping by mapping; a mapping over a non-mapping starts from that field's defaults."""
    merged = dict(base)
    for key, value in patch.items():
        below = merged.get(key)
        merged[key] = merge(below if isinstance(below, Mapping) else {}, value) if isinstance(value, Mapping) else value
    return merged
