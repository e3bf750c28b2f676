"""Reads calls from the source, and the texts that their arguments may have, without running the code."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
from pathlib import Path

from attrs import evolve, field, frozen

ROOT = Path(__file__).parents[1]

UNKNOWN = "…"
"""Stands for a part of a text that is only known at run time."""

DEEPEST = 6
"""How many names are followed from one to the next to find a value."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Bound = Mapping[str, "tuple[ast.expr, Call] | None"]


@frozen(eq=False)
class Module:
    """A source file: its syntax tree, and the modules from which it imports names."""

    path: Path
    tree: ast.Module

    @property
    def imported(self) -> Mapping[str, str]:
        """The module from which each name is imported."""
        froms = (node for node in ast.walk(self.tree) if isinstance(node, ast.ImportFrom) and node.module)
        return {alias.asname or alias.name: f"{each.module}.{alias.name}" for each in froms for alias in each.names}

    def constant(self, name: str) -> tuple[ast.expr, Module] | None:
        """The value of a constant of the module, or of one that it imports."""
        for node in self.tree.body:
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            if value is not None and any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return value, self
        module, _, original = self.imported.get(name, "").rpartition(".")
        stem = ROOT / module.replace(".", "/")
        for path in (stem.with_suffix(".py"), stem / "__init__.py"):
            if module and path.is_file():
                return parsed(path).constant(original)
        return None


@cache
def parsed(path: Path) -> Module:
    """The file's module."""
    return Module(path, ast.parse(path.read_text()))


@frozen(eq=False)
class Call:
    """A call, the function that it stands in, and what that function's parameters are bound to."""

    module: Module
    node: ast.Call
    within: Function | None
    bindings: Bound = field(factory=dict)

    @property
    def function(self) -> str:
        """The name of the function that it stands in."""
        return self.within.name if self.within is not None else ""

    @property
    def where(self) -> str:
        """File and line."""
        return f"{self.module.path.relative_to(ROOT)}:{self.node.lineno}"

    @property
    def is_method(self) -> bool:
        """Whether a method is called, not a function of a module."""
        called = self.node.func
        if not isinstance(called, ast.Attribute):
            return False
        return not (isinstance(called.value, ast.Name) and called.value.id in self.module.imported)

    def argument(self, place: int, name: str) -> ast.expr | None:
        """An argument, given by its place or its name."""
        named = next((keyword.value for keyword in self.node.keywords if keyword.arg == name), None)
        return self.node.args[place] if place < len(self.node.args) else named

    def texts(self, place: int, name: str, computed: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
        """What an argument can be; :data:`UNKNOWN` for each part that only a run decides."""
        argument = self.argument(place, name)
        return tuple(dict.fromkeys(_texts(argument, self, computed, DEEPEST))) if argument is not None else ()

    def bound(self, arguments: Mapping[str, int], depth: int = 2) -> Iterator[Call]:
        """This call, once for each call of its function if parameters of that decide one of these arguments.

        :param arguments: their places by their names.
        """
        values = [value for name, place in arguments.items() if (value := self.argument(place, name)) is not None]
        parameters = _parameters(self.within)
        deciding = {name for value in values for name in _deciding(value, self)} & set(parameters)
        callers = _callers(self.within) if deciding and depth else ()
        if not callers:
            yield self
        needed = {name: parameters.index(name) for name in deciding}
        for outer in (each for call in callers for each in call.bound(needed, depth - 1)):
            yield evolve(self, bindings=_bindings(self.within, parameters, outer))


def _callers(function: Function | None) -> tuple[Call, ...]:
    """The agent's calls of a function; a method is called on something that is no imported module."""
    if function is None:
        return ()
    is_method = bool(function.args.args) and function.args.args[0].arg == "self"
    return tuple(call for call in calls("agent", function.name) if call.is_method == is_method)


def _deciding(value: ast.expr, call: Call, depth: int = DEEPEST) -> Iterator[str]:
    """The names that the value may come from."""
    if isinstance(value, ast.Name):
        yield value.id
        for assigned in _assigned(call.within, value.id, call.node) if depth else ():
            yield from _deciding(assigned, call, depth - 1)
    elif isinstance(value, ast.IfExp):
        yield from _deciding(value.body, call, depth)
        yield from _deciding(value.orelse, call, depth)


def _bindings(function: Function | None, parameters: list[str], call: Call) -> Bound:
    given = function.args.defaults if function is not None else []
    defaults = dict(zip(reversed(parameters), reversed(given), strict=False))
    bound: dict[str, tuple[ast.expr, Call] | None] = {}
    for place, name in enumerate(parameters):
        argument = call.argument(place, name) or defaults.get(name)
        bound[name] = (argument, call) if argument is not None else None
    return bound


def _parameters(function: Function | None) -> list[str]:
    names = [each.arg for each in function.args.args] if function is not None else []
    return names[1:] if names[:1] == ["self"] else names


@cache
def calls(folder: str, name: str) -> tuple[Call, ...]:
    """All calls of a function or method ``name`` in the files of a folder."""
    matches = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        module = parsed(path)
        for node, within in _walk(module.tree, None):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called == name:
                matches.append(Call(module, node, within))
    return tuple(matches)


def _walk(tree: ast.AST, within: Function | None) -> Iterator[tuple[ast.Call, Function | None]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call):
            yield node, within
        yield from _walk(node, node if isinstance(node, Function) else within)


def _assigned(function: Function | None, name: str, call: ast.AST) -> Iterator[ast.expr]:
    """The values that the name may have at the call: from the last unconditional assignment and those after it."""
    path = _statements(function, call) if function is not None else []
    for block, place in reversed(path):
        for statement in reversed(block[:place]):
            yield from _values(statement, name)
            if isinstance(statement, ast.Assign) and any(_values(statement, name)):
                return


def _statements(within: ast.AST, call: ast.AST) -> list[tuple[list[ast.stmt], int]]:
    """The blocks around the call, the outermost first, each with the index of the statement that contains the call."""
    for block in (value for _, value in ast.iter_fields(within) if isinstance(value, list)):
        for place, statement in enumerate(block):
            if isinstance(statement, ast.stmt) and any(node is call for node in ast.walk(statement)):
                return [(block, place), *_statements(statement, call)]
    return []


def _values(statement: ast.stmt, name: str) -> Iterator[ast.expr]:
    """The values that a statement, or one nested in it, assigns to the name."""
    for node in ast.walk(statement):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            if isinstance(target, ast.Name) and target.id == name:
                yield node.value
            elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = zip(target.elts, node.value.elts, strict=True)
                yield from (value for part, value in pairs if isinstance(part, ast.Name) and part.id == name)


def _texts(node: ast.expr, call: Call, computed: Mapping[str, tuple[str, ...]], depth: int) -> list[str]:
    """The texts that an expression in the call's function may have."""
    if ast.unparse(node) in computed:
        return list(computed[ast.unparse(node)])
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    parts: list[ast.expr] = []
    if isinstance(node, ast.IfExp):
        parts = [node.body, node.orelse]
    elif isinstance(node, ast.Name) and depth:
        return _named(node.id, call, computed, depth - 1)
    elif isinstance(node, ast.JoinedStr):
        values = [value.value if isinstance(value, ast.FormattedValue) else value for value in node.values]
        pieces = [_texts(value, call, computed, min(depth, 1)) for value in values]
        return ["".join(choice) for choice in product(*(piece if len(piece) == 1 else [UNKNOWN] for piece in pieces))]
    return [text for part in parts for text in _texts(part, call, computed, depth)] or [UNKNOWN]


def _named(name: str, call: Call, computed: Mapping[str, tuple[str, ...]], depth: int) -> list[str]:
    """The texts of a name: a local variable, a parameter, or a constant of the module."""
    if assigned := list(_assigned(call.within, name, call.node)):
        return [text for value in assigned for text in _texts(value, call, computed, depth)]
    if bound := call.bindings.get(name):
        value, outer = bound
        return _texts(value, outer, computed, depth)
    if name in _parameters(call.within):
        return [UNKNOWN]
    if definition := call.module.constant(name):
        value, module = definition
        return _texts(value, Call(module, call.node, None), computed, depth)
    return [UNKNOWN]
