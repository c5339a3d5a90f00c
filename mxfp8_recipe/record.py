"""One forward, recorded: which module or function produced each tensor and who read it.

Modules are seen through hooks that live as long as the recording, functions through a `TorchFunctionMode`.
Inside a module the planner treats as one piece (a linear, a norm, an attention) nothing is recorded. Views
that keep the last dim and the order of the rows are the same value under another shape; a function that
reads only metadata (`shape`, `dtype`) reads nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_VIEWS = {"view", "reshape", "flatten", "squeeze", "unsqueeze", "contiguous", "to", "dropout", "alias", "view_as"}
_METADATA = {
    "size", "dim", "numel", "stride", "is_floating_point", "is_contiguous", "element_size", "type", "is_complex",
    "storage_offset", "get_device", "ndimension", "nelement", "__len__", "__get__", "is_tensor",
    "requires_grad_", "dense_dim", "is_inference", "is_same_size", "__hash__", "__format__", "__repr__",
}  # fmt: skip


@dataclasses.dataclass
class Node:
    """One call: of a module the planner knows, of a function, or the model's own return.

    Attributes:
        kind: `module`, `function` or `output`.
        name: the module's FQN, or the function's name.
        path: the modules whose forward was running, outermost first, this one excluded.
        inputs: values read, in argument order. outputs: values made.
        options: a function's non-tensor arguments that matter to matching.
        grad_enabled: whether autograd was recording.
        without_grad: the enclosing module calls that began while it was not.
        last_dims: last dim of each input. shapes: of each output.
        recomputed: it ran under hooks on what it saves for backward, as non-reentrant checkpointing does.
    """

    kind: str
    name: str
    path: tuple[nn.Module, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    grad_enabled: bool = True
    last_dims: tuple[int, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    without_grad: frozenset[int] = frozenset()
    recomputed: bool = False


@dataclasses.dataclass
class Recording:
    """The calls of one forward in order, and what is known of the values between them.

    Attributes:
        nodes: every recorded call.
        overwritten: values some function wrote into.
        tokens: product of the leading dims of each module's first input, by FQN.
        recomputes: some call ran under hooks on what it saves for backward, as non-reentrant checkpointing does.
    """

    nodes: list[Node] = dataclasses.field(default_factory=list)
    overwritten: set[int] = dataclasses.field(default_factory=set)
    tokens: dict[str, int] = dataclasses.field(default_factory=dict)
    recomputes: bool = False

    def readers(self, value: int) -> list[Node]:
        return [node for node in self.nodes if value in node.inputs]

    def calls(self, name: str) -> list[Node]:
        return [node for node in self.nodes if node.kind == "module" and node.name == name]


class Recorder(TorchFunctionMode):
    """Records while it is entered; `watch(model, pieces)` also installs and removes the hooks."""

    def __init__(self, intercept: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.recording = Recording()
        self._intercept = intercept
        self._values: dict[int, int] = {}
        self._keep: list[Any] = []  # no tensor dies while recording, so no id is used twice
        self._path: list[nn.Module] = []
        self._without_grad: list[int] = []  # for each module on the path, the number of its call, or 0
        self._calls = 0
        self._inside = 0
        self._thread = get_ident()  # the hooks fire in every thread that runs the model
        self._versions: list[int] = []  # of each kept tensor when it was first seen
        self._given: list[Tensor] = []  # inputs of the piece that runs, before torch wraps them for backward hooks
        self._given_values: list[int] = []

    def value_of(self, tensor: Tensor) -> int:
        if id(tensor) not in self._values:
            self._register(tensor, len(self._keep))
        return self._values[id(tensor)]

    def _register(self, tensor: Tensor, value: int) -> None:
        self._values[id(tensor)] = value
        self._keep.append(tensor)
        self._versions.append(_version(tensor))

    def _is_written(self, value: int) -> bool:
        """Whether some op wrote to a value, or to what shares its memory, since it was made."""
        return _version(self._keep[value]) != self._versions[value]

    def _rename(self, tensor: Tensor) -> None:
        """What a module made by overwriting its input is another value in the same tensor."""
        del self._values[id(tensor)]
        self.value_of(tensor)

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = self._run(func, args, kwargs)
        if not self._inside:
            self._record_function(func, args, kwargs, result)
        return result

    def _run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._intercept is not None and not self._inside:
            owner = self._path[-1] if self._path else None
            replaced = self._intercept(owner, func, args, kwargs)
            if replaced is not NotImplemented:
                return replaced
        return func(*args, **kwargs)

    def _record_function(self, func: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        name = getattr(func, "__name__", str(func))
        inputs = [self.value_of(t) for t in tensors_in((args, kwargs))]
        made = list(tensors_in(result))
        if not inputs or (name in _METADATA and not made):
            return
        if _is_same_value(name, args, result):
            if id(result) not in self._values:
                self._register(result, inputs[0])
            return
        if getattr(func, "__self__", None) is Tensor.data:  # what is written through it does not count as a write
            self.recording.overwritten.update(inputs)
        if (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or "out" in kwargs:
            self.recording.overwritten.update(self.value_of(t) for t in made)
        self._add("function", name, inputs, made, _options(args, kwargs))

    def _add(self, kind: str, name: str, inputs: list[int], made: list[Tensor], options: dict[str, Any]) -> None:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore[reportAttributeAccessIssue]
        self.recording.recomputes |= hooks is not None
        outputs = tuple(self.value_of(t) for t in made)
        last_dims = tuple(t.shape[-1] if t.dim() else 0 for t in (self._keep[value] for value in inputs))
        shapes = tuple(tuple(t.shape) for t in made)
        without_grad = frozenset(self._without_grad) - {0}
        facts = (options, torch.is_grad_enabled(), last_dims, shapes, without_grad, hooks is not None)
        self.recording.nodes.append(Node(kind, name, tuple(self._path), tuple(inputs), outputs, *facts))

    def enter_module(self, module: nn.Module, piece: bool, inputs: Any) -> None:
        if get_ident() != self._thread:
            return
        if piece and not self._inside:
            self._given = list(tensors_in(inputs))
            self._given_values = [self.value_of(t) for t in self._given]
        self._path.append(module)
        self._calls += 1
        self._without_grad.append(0 if torch.is_grad_enabled() else self._calls)
        self._inside += piece

    def leave_module(self, module: nn.Module, piece: bool, name: str, output: Any) -> None:
        if get_ident() != self._thread:
            return
        self._path.pop()
        self._without_grad.pop()
        self._inside -= piece
        if piece and not self._inside:
            read, values, made = self._given, self._given_values, list(tensors_in(output))
            for t in made:
                if any(t is given for given in read) and self._is_written(self.value_of(t)):
                    self._rename(t)
            self._add("module", name, values, made, {})
            if read and read[0].dim():
                self.recording.tokens[name] = read[0].numel() // max(read[0].shape[-1], 1)

    def finish(self, output: Any) -> None:
        self._add("output", "the model's output", [self.value_of(t) for t in tensors_in(output)], [], {})

    @contextmanager
    def watch(self, names: dict[nn.Module, str], pieces: Collection[nn.Module]) -> Iterator[Recording]:
        """Record every forward of the modules in `names` until the block ends."""
        handles = []
        for module, name in names.items():
            piece = module in pieces

            def before(module: nn.Module, args: Any, kwargs: Any, piece: bool = piece) -> None:
                self.enter_module(module, piece, (args, kwargs))

            def after(
                module: nn.Module, args: Any, kwargs: Any, output: Any, piece: bool = piece, name: str = name
            ) -> None:
                self.leave_module(module, piece, name, output)

            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after, with_kwargs=True, prepend=True))
        try:
            with self:
                yield self.recording
        finally:
            for handle in handles:
                handle.remove()
            self.recording.overwritten.update(filter(self._is_written, range(len(self._keep))))
            self._keep.clear()


def tensors_in(value: Any, depth: int = 6) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, mappings and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item, depth - 1)
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item, depth - 1)
    elif depth and dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name), depth - 1)


def _version(tensor: Tensor) -> int:
    """How often a tensor was written to; those of inference mode do not count that."""
    return 0 if tensor.is_inference() else tensor._version


def _is_slice(index: Any) -> bool:
    """Whether an index can only cut: what keeps its shape under it is itself."""
    return all(isinstance(i, slice) or i is Ellipsis for i in (index if isinstance(index, tuple) else (index,)))


def _is_same_value(name: str, args: Any, result: Any) -> bool:
    first = args[0] if args else None
    if name == "__getitem__" and isinstance(first, Tensor) and isinstance(result, Tensor):
        return result.shape == first.shape and _is_slice(args[1])
    if name not in _VIEWS or not isinstance(first, Tensor) or not isinstance(result, Tensor):
        return False
    if result is first:
        return True
    same_rows = result.dim() > 0 and first.dim() > 0 and result.shape[-1] == first.shape[-1]
    return same_rows and result.dtype == first.dtype and name not in ("dropout", "to")


def _options(args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    options = {key: value for key, value in kwargs.items() if isinstance(value, str | bool | int | float)}
    for position, value in enumerate(args):
        if isinstance(value, str | bool | int | float):
            options[f"arg{position}"] = value
    return options
