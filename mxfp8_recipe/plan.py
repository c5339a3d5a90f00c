"""What a recipe would do to a model, as a table: one row a layer, and the edges between them."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from torch import nn

from .config import BF16, LinearPrecision, Override, Recipe
from .costs import DEFAULT_TOKENS, FAST_RECIPES, Cost, linear_cost
from .edges import EdgePlan
from .epilogue_edges import EpiloguePlan
from .recipe_files import load_recipe
from .te_interop import GEMMS, inspect_yaml


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """One candidate layer.

    Attributes:
        fqn: fully qualified name, `""` for a root that is itself a layer. aliases: its other names, if used twice.
        kind, in_features, out_features: what it is.
        old_type, new_type: class names; `new_type` is None for a layer left alone, and `reason` says why.
        precision: what each GEMM runs in; `"bf16"` for a layer left alone.
        implementation: the MXFP8 class, None for a layer left alone. module_config: what it needs to know of the
            module besides the precision.
        found_by_recording: the layer shows only in a recorded forward, as calls of attention do.
        mixes_tokens: some tile spans several tokens, so one token's value moves another's output.
        tokens: rows a forward gives it, 0 where no forward was recorded.
        cost: predicted times.
    """

    fqn: str
    aliases: tuple[str, ...] = ()
    kind: str
    in_features: int
    out_features: int
    old_type: str
    new_type: str | None
    reason: str
    precision: Any
    implementation: type[nn.Module] | None
    module_config: Any = None
    found_by_recording: bool = False
    mixes_tokens: bool
    tokens: int = 0
    cost: Cost

    @property
    def gemms(self) -> dict[str, str]:
        """Precision of each GEMM as short text, such as `1x32 @ 1x32` or `bf16`; empty for a layer without any."""
        if self.kind in ("norm", "activation"):
            return {}
        if self.precision == BF16:
            return {"all": BF16}
        return dict(_gemms_of(self.precision))

    def to_dict(self) -> dict[str, Any]:
        skipped = ("precision", "implementation", "module_config", "cost")
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in skipped}
        return values | {"aliases": list(self.aliases), "gemms": self.gemms, "predicted_ratio": self.cost.ratio}


def _gemms_of(precision: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    for name in type(precision).model_fields:
        value = getattr(precision, name)
        if value == BF16 or hasattr(value, "operands"):
            yield prefix + name, describe_gemm(value)
        elif isinstance(value, LinearPrecision):
            yield from _gemms_of(value, f"{name}.")


def _is_linear_mxfp8(layer: LayerPlan) -> bool:
    """Whether the forward GEMM of a linear, or of the projections of attention, is MXFP8."""
    if layer.new_type is None:
        return False
    linear = layer.precision if layer.kind == "linear" else layer.precision.projections
    return isinstance(linear, LinearPrecision) and linear.fprop != BF16


def _call_gemms(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """What the recipe says of attention a module's own forward calls, which has no projections."""
    if recipe.attention != BF16:
        yield from ((k, v) for k, v in _gemms_of(recipe.attention) if not k.startswith("projections"))


def describe_gemm(gemm: Any) -> str:
    """Short text of one GEMM's precision."""
    return BF16 if gemm == BF16 else " @ ".join(spec.short for spec in gemm.operands)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The table `print` shows, and what `apply_recipe` carries out.

    Attributes:
        layers: every candidate, converted or not. edges: what may travel quantized between them.
        epilogues: steps of those edges that a GEMM takes before it stores its sum.
        backend: the one that runs its ops. why: what made it that one, and what to install for a better one.
        emulates: that backend multiplies the operands' values in a wider type.
        recorded: where the edges come from: `example_inputs`, `first forward`, or `""` for no recording yet.
        overrides: the user's, which also decide for attention calls a later recording finds.
        awaited: patterns among them that matched nothing yet and may name such a call.
        demoted: layers taken back to BF16 since, with the reason.
    """

    recipe: Recipe
    layers: tuple[LayerPlan, ...]
    device: str
    backend: str
    why: str = ""
    emulates: bool = False
    edges: tuple[EdgePlan, ...] = ()
    epilogues: tuple[EpiloguePlan, ...] = ()
    recorded: str = ""
    notes: tuple[str, ...] = ()
    overrides: Mapping[str, Override] = field(default_factory=dict)
    awaited: tuple[str, ...] = ()
    demoted: Mapping[str, str] = field(default_factory=dict)

    @property
    def converted(self) -> tuple[LayerPlan, ...]:
        return tuple(layer for layer in self.layers if layer.new_type is not None)

    @property
    def cost(self) -> Cost:
        return sum((layer.cost for layer in self.layers), start=Cost(0.0, 0.0))

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What a checkpoint records: all that decides the bits of training, in plain text.

        Edges do not change bits, except those that take over functions of the user's own code.
        """
        layers = {"calls of attention": ", ".join(f"{k}={v}" for k, v in _call_gemms(self.recipe))}
        for layer in self.converted:
            if layer.found_by_recording:
                continue
            gemms = "; ".join(f"{k}={v}" for k, v in layer.gemms.items())
            layers[layer.fqn] = gemms or layer.kind
        for edge in self.edges:
            if edge.fused and edge.kind in ("gated", "function"):
                layers[edge.producer] = f"{layers.get(edge.producer, '')}; {edge.kind} into {edge.consumers[0]}"
        digest = hashlib.sha256(json.dumps(layers, sort_keys=True).encode()).hexdigest()
        return {"recipe": self.recipe.name, "digest": digest, "layers": layers, "demoted": dict(self.demoted)}

    @property
    def gpu_emulates(self) -> bool:
        """A GPU is there and does not multiply MXFP8 itself."""
        return self.emulates and self.device == "cuda"

    def linear_share(self) -> float:
        """Share of the linear layers' FLOPs (at the recorded tokens) whose forward GEMM is MXFP8."""
        total = converted = 0
        for layer in self.layers:
            size = layer.in_features * layer.out_features * (layer.tokens or 1)
            if layer.kind == "attention":
                size *= 4  # query, key, value and output projections
            if layer.kind in ("linear", "attention"):
                total += size
                converted += size if _is_linear_mxfp8(layer) else 0
        return converted / total if total else 0.0

    def faster_recipe(self) -> str:
        """A recipe predicted to be faster than BF16 for these linears on this backend, else `bf16`."""
        candidate = FAST_RECIPES.get(self.backend)
        if candidate is None or candidate == self.recipe.name:
            return BF16
        precision = load_recipe(candidate).linear
        costs = [
            linear_cost(la.tokens or DEFAULT_TOKENS, la.in_features, la.out_features, precision, self.backend)
            for la in self.converted
            if la.kind == "linear"
        ]
        total = sum(costs, start=Cost(0.0, 0.0))
        return candidate if costs and total.ratio > 1.0 else BF16

    def to_nvdlfw_inspect(self) -> str:
        """The linear layers and GEMMs that stay in high precision, as YAML for Nvidia-DL-Framework-Inspect.

        With it, and `recipe.to_transformer_engine()`, a model whose layers of these names are TransformerEngine's
        trains in this plan's precision.

        Raises:
            ValueError: for a layer whose MXFP8 GEMMs are not the recipe's own, since there is one recipe for all.
        """
        linear = self.recipe.linear
        layers: dict[str, tuple[str, ...]] = {}
        other = []
        for layer in self.layers:
            if layer.kind != "linear":
                continue
            precision = {g: BF16 if layer.precision == BF16 else getattr(layer.precision, g) for g in GEMMS}
            layers[layer.fqn] = tuple(g for g in GEMMS if precision[g] == BF16)
            if any(p not in (BF16, linear if linear == BF16 else getattr(linear, g)) for g, p in precision.items()):
                other.append(layer.fqn)
        if other:
            raise ValueError(
                f"to_nvdlfw_inspect: {', '.join(other)}: got an MXFP8 precision of their own, expected recipe "
                f"{self.recipe.name}'s or bf16; TransformerEngine has one recipe for all layers"
            )
        return inspect_yaml(layers)

    def to_dict(self) -> dict[str, Any]:
        edges = [{"kind": e.kind, "producer": e.producer, "consumers": list(e.consumers), "fused": e.fused,
                  "reason": e.reason, "emit_high": e.emit_high} for e in self.edges]  # fmt: skip
        return {
            "recipe": self.recipe.name,
            "device": self.device,
            "backend": self.backend,
            "why": self.why,
            "emulates": self.emulates,
            "layers": [layer.to_dict() for layer in self.layers],
            "edges": edges,
            "epilogues": [{"linear": e.linear, "gemm": e.gemm, "what": str(e)} for e in self.epilogues],
            "recorded": self.recorded,
            "predicted_ratio": self.cost.ratio,
            "linear_flops_in_mxfp8": self.linear_share(),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        """The table, in the terminal's width, or 180 columns without one, and sentences under it."""
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 180
        console = Console(file=io.StringIO(), width=width, force_terminal=False)
        whole = self.table()
        fits = Measurement.get(console, console.options.update(width=10_000), whole).maximum <= width
        console.print(whole if fits or width >= 180 else self.narrow_table())
        for line in self.summary():
            console.print(line, highlight=False, markup=False, emoji=False, soft_wrap=True)
        return console.file.getvalue().rstrip()  # pyright: ignore[reportAttributeAccessIssue]

    def table(self) -> Table:
        """One row a candidate layer; speed is predicted, of its GEMMs, as a multiple of BF16's."""
        table = Table(title=f"recipe {self.recipe.name} on {self.device}, backend {self.backend}", expand=False)
        for name in ("layer", "type", "in", "out", "becomes", "GEMMs", "edge", "speed", "note"):
            table.add_column(name, overflow="fold", justify="right" if name in ("in", "out", "speed") else "left")
        edges = {edge.producer: str(edge) for edge in self.edges}
        for epilogue in self.epilogues:
            before = edges.get(epilogue.linear)
            edges[epilogue.linear] = f"{before}; {epilogue}" if before else str(epilogue)
        for layer in self.layers:
            note = "; ".join(filter(None, (layer.reason, "mixes tokens" if layer.mixes_tokens else "", _also(layer))))
            table.add_row(
                layer.fqn or "(root)",
                layer.old_type,
                str(layer.in_features or "-"),
                str(layer.out_features or "-"),
                layer.new_type or "-",
                _gemms_text(layer),
                edges.get(layer.fqn, ""),
                f"{layer.cost.ratio:.2f}x" if layer.cost.bf16 else "-",
                note,
            )
        return table

    def narrow_table(self) -> Table:
        """The same in two columns of text, for terminals that would break words and figures in `table`."""
        table = Table(title=self.table().title, expand=False, show_lines=True)
        table.add_column("layer", overflow="fold", ratio=1)
        table.add_column("what it becomes", overflow="fold", ratio=2)
        whole = self.table()
        for layer, kind, ins, outs, becomes, gemms, edge, ratio, note in zip(*(c.cells for c in whole.columns)):
            size = f" {ins} to {outs}" if ins != "-" else ""
            speed = f", {ratio} of BF16's speed" if ratio != "-" else ""
            parts = (f"{kind}{size}: {becomes if becomes != '-' else 'left alone'}{speed}", gemms, edge, note)
            table.add_row(layer, "\n".join(str(part) for part in parts if part))
        return table

    def summary(self) -> list[str]:
        """Sentences under the table: how much is converted, the predicted total, and what to do about it."""
        if not self.layers:
            return ["This model has no linear, norm, activation or attention layer: nothing changes.", *self.notes]
        lines = [
            f"{len(self.converted)} of {len(self.layers)} candidate layers become MXFP8; "
            f"{self.linear_share():.1%} of linear FLOPs."
        ]
        if self.recorded:
            fused = sum(edge.fused for edge in self.edges)
            inside = f"; {len(self.epilogues)} GEMMs have steps in their epilogue" if self.epilogues else ""
            lines.append(f"{fused} of {len(self.edges)} edges are fused (from {self.recorded}){inside}.")
        elif self.converted and self.recipe.fuse:
            lines.append(
                "No edge is fused yet: they are found by the first eager training forward. Pass example_inputs to "
                "fuse from the first step, under torch.compile, and across pointwise code."
            )
        if self.awaited and not self.recorded:
            awaited = ", ".join(map(repr, self.awaited))
            lines.append(f"{awaited}: matches no layer yet; attention calls show in the first training forward.")
        ratio = self.cost.ratio
        if self.gpu_emulates:
            lines.append(f"NOT NATIVE: {self.why}. For numerics, not for speed.")
        elif self.backend == "reference":
            lines.append(f"The reference backend emulates MXFP8 on {self.device}: for numerics, not for speed.")
        elif self.why:
            lines.append(f"Backend {self.backend}: {self.why}.")
        if ratio < 0.995:
            lines.append(
                f"Predicted: linears run at {ratio:.2f}x of BF16's speed on this device, slower; "
                f"the faster recipe here is {self.faster_recipe()!r}."
            )
        elif self.converted:
            lines.append(f"Predicted: linears run at {ratio:.2f}x of BF16's speed.")
        return lines + list(self.notes)


def _gemms_text(layer: LayerPlan) -> str:
    gemms = layer.gemms
    if layer.kind == "attention" and not layer.in_features:  # its projections are layers of their own, with their rows
        gemms.pop("projections", None)
    values = list(dict.fromkeys(gemms.values()))
    if len(values) == 1:
        return values[0]
    return "\n".join(f"{name} {value}" for name, value in gemms.items())


def _also(layer: LayerPlan) -> str:
    return f"also {', '.join(layer.aliases)}" if layer.aliases else ""
