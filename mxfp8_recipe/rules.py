r"""Per-layer overrides: exact FQN, then `re:` full match, then layer kind; the first of the closest wins.

overrides = {
"tower.3.up": {"wgrad": "bf16"},     # exact fully qualified name
r"re:heads\..*": "bf16",              # regular expression over the whole name, in the order written
"kind:linear": "mxfp8_square",       # every layer of a kind
}
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .config import BF16, KIND_PRECISION, Frozen, Override, Recipe, merge, validate
from .fused.spec import near_misses
from .recipe_files import load_recipe

_REGEX, _KIND = "re:", "kind:"


@dataclass(frozen=True)
class Match:
    """The rule that applies to a layer, and whether it named the layer exactly."""

    pattern: str
    override: Override
    exact: bool


class Rules:
    """An ordered set of overrides that remembers which of its patterns matched something.

    Raises:
        ValueError: on construction, for a pattern that is no regular expression or no known kind.
    """

    def __init__(self, overrides: Mapping[str, Override], origin: str) -> None:
        self.origin = origin
        self._overrides = dict(overrides)
        self.overrides: Mapping[str, Override] = self._overrides
        self._used: set[str] = set()
        for pattern, override in overrides.items():
            self._check(pattern, override)
        self.regexes = [(p, self._compile(p)) for p in overrides if p.startswith(_REGEX)]

    def match(self, names: Iterable[str], kind: str) -> Match | None:
        """The rule for a layer known by `names` (a module used twice has several)."""
        names = list(names)
        for name in names:
            if name in self._overrides and not name.startswith((_REGEX, _KIND)):
                return self._hit(name, exact=True)
        for pattern, regex in self.regexes:
            if self._speaks_of(pattern, kind) and any(regex.fullmatch(name) for name in names):
                return self._hit(pattern)
        if _KIND + kind in self._overrides:
            return self._hit(_KIND + kind)
        return None

    def unmatched(self) -> list[str]:
        return [pattern for pattern in self._overrides if pattern not in self._used]

    def may_name_calls(self, callers: list[str]) -> tuple[str, ...]:
        """Unmatched patterns that may yet name a module which calls attention, as only a recording shows."""
        regexes = dict(self.regexes)
        return tuple(
            pattern
            for pattern in self.unmatched()
            if pattern == f"{_KIND}attention"
            or pattern in callers
            or (pattern in regexes and any(regexes[pattern].fullmatch(name) for name in callers))
        )

    def _speaks_of(self, pattern: str, kind: str) -> bool:
        """A partial mapping under a regular expression is for the kinds that have its fields."""
        override = self._overrides[pattern]
        return isinstance(override, str) or set(override) <= set(KIND_PRECISION[kind].model_fields)

    def _hit(self, pattern: str, exact: bool = False) -> Match:
        self._used.add(pattern)
        return Match(pattern, self._overrides[pattern], exact)

    def _compile(self, pattern: str) -> re.Pattern[str]:
        try:
            return re.compile(pattern.removeprefix(_REGEX))
        except re.error as error:
            raise ValueError(f"{self.origin}: {pattern!r} is not a regular expression: {error}") from None

    def _check(self, pattern: str, override: Any) -> None:
        if not isinstance(pattern, str):
            raise ValueError(f"{self.origin}: got the pattern {pattern!r}, expected text; quote it")
        if pattern.startswith(_KIND) and pattern.removeprefix(_KIND) not in KIND_PRECISION:
            kinds = ", ".join(_KIND + kind for kind in KIND_PRECISION)
            raise ValueError(f"{self.origin}: got {pattern!r}, expected one of {kinds}")
        if not isinstance(override, str | Mapping):
            raise ValueError(
                f"{self.origin}: {pattern!r}: got {override!r}, expected 'bf16', a recipe's name or a mapping "
                "such as {'wgrad': 'bf16'}"
            )
        if isinstance(override, Mapping):
            known = list(dict.fromkeys(name for cls in KIND_PRECISION.values() for name in cls.model_fields))
            for name in override:
                if name not in known:
                    close = near_misses(str(name), known)
                    raise ValueError(
                        f"{self.origin}: {pattern!r}: {name}: unknown field{close}; fields are {', '.join(known)}"
                    )


def check_all_matched(
    rules: Rules, layer_names: list[str], container_names: list[str], excused: Collection[str] = ()
) -> None:
    """Raise one ValueError naming every pattern that matched no layer, with near misses, save the excused."""
    problems = []
    for pattern in rules.unmatched():
        if pattern in excused:
            continue
        if pattern == "":
            remedy = f"; the root is a container, say {_REGEX + '.*'!r} for all layers"
        elif any(regex.fullmatch(name) for p, regex in rules.regexes if p == pattern for name in layer_names):
            remedy = "; those it names are spoken of by closer rules, or have none of its fields"
        elif pattern in container_names:
            remedy = f"; it is a container, say '{_REGEX}{re.escape(pattern)}\\..*' for the layers inside it"
        elif pattern.startswith((_REGEX, _KIND)):
            remedy = f"; layers are named like {', '.join(layer_names[:3]) or '(the model has none)'}"
        else:
            remedy = near_misses(pattern, layer_names) or f"; layers are {_shorten(layer_names)}"
        problems.append(f"{pattern!r} matches no layer{remedy}")
    if problems:
        raise ValueError(f"{rules.origin}: " + "; ".join(problems))


def _shorten(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "none"


def apply_override(base: Any, override: Override, kind: str, where: str) -> Any:
    """`base` (a precision or `"bf16"`) changed by `override`.

    Returns:
        An instance of `KIND_PRECISION[kind]`, or `"bf16"`.
    """
    if override == BF16:
        return BF16
    if isinstance(override, str):
        try:
            return load_recipe(override).precision(kind)
        except (ValueError, OSError) as error:
            raise ValueError(f"{where}: got {override!r}, expected 'bf16', a mapping or a recipe; {error}") from None
    cls = KIND_PRECISION[kind]
    start = _all_bf16(cls) if base == BF16 else base.model_dump(mode="json")
    return validate(cls, merge(start, override), where)


def _all_bf16(cls: type[Frozen]) -> dict[str, Any]:
    """Every GEMM of a kind in BF16, its switches at their defaults."""
    return {name: BF16 for name, field in cls.model_fields.items() if not isinstance(field.default, bool)}


def base_precision(recipe: Recipe, rules: Rules, names: list[str], kind: str) -> tuple[Any, str]:
    """A layer's precision by the recipe alone, and why it is BF16 if it is."""
    precision = recipe.precision(kind)
    if precision == BF16:
        return BF16, f"recipe {recipe.name} leaves {kind} layers in BF16"
    match = rules.match(names, kind)
    if match is None:
        return precision, ""
    changed = apply_override(precision, match.override, kind, f"{rules.origin}: {match.pattern!r}")
    return changed, f"{rules.origin} {match.pattern!r} says bf16" if is_bf16(changed) else ""


def is_bf16(precision: Frozen | str) -> bool:
    """Whether every GEMM of a precision is BF16."""
    return precision == BF16 or getattr(precision, "is_bf16", False)
