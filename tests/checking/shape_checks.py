"""Which functions have their shapes checked while the tests run."""

import ast

from beartype import beartype
from jaxtyping import _import_hook


class Shaped(_import_hook.JaxtypingTransformer):
    """Decorates the functions and records that name a shape, and no others.

    To decorate every function, as jaxtyping does, takes two fifths of the time of all tests: most calls are of
    functions without arrays, whose types are checked by pyright, and a function inside another one would be decorated
    anew at each call of the outer one.
    """

    def visit_Module(self, node: ast.Module) -> ast.Module:
        """Import jaxtyping, and see under which names the module knows its types."""
        imported = [child for child in node.body if isinstance(child, ast.ImportFrom) and child.module == "jaxtyping"]
        self._arrays = {name.asname or name.name for child in imported for name in child.names}
        return super().visit_Module(node) if self._arrays else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """Decorate it last, if its signature names a shape; what stands inside is left alone."""
        if self._names_a_shape(node.args, node.returns):
            node.decorator_list.append(ast.copy_location(self._typechecker.get_ast(), node))
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        """Decorate it first, if a field names a shape; then its methods."""
        if self._names_a_shape(*(child for child in node.body if isinstance(child, ast.AnnAssign))):
            node.decorator_list.insert(0, ast.copy_location(self._typechecker.get_ast(), node))
        self.generic_visit(node)
        return node

    def _names_a_shape(self, *nodes: ast.AST | None) -> bool:
        names = (part for node in nodes if node is not None for part in ast.walk(node) if isinstance(part, ast.Name))
        return any(name.id in self._arrays for name in names)


checked = beartype
"""Beartype under another name: jaxtyping caches what it compiles under the checker's name."""

_import_hook.JaxtypingTransformer = Shaped
