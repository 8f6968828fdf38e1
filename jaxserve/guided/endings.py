"""Which schemas have texts that come to an end, where schemas contain themselves.

An object that needs itself as a property is never complete; a model must not be led into one.
"""

from dataclasses import replace

from jaxserve.errors import SchemaError
from jaxserve.guided.cases import Cases
from jaxserve.guided.shapes import ANY, Array, Key, Object, Shape
from jaxserve.guided.strings import Length


class Endings:
    """The shapes of a document's schemas, less what never ends."""

    def __init__(self, cases: Cases) -> None:
        self._cases = cases
        self._shapes: dict[Key, tuple[Shape, ...]] = {}

    def shapes(self, key: Key) -> tuple[Shape, ...]:
        """Return the shapes of texts that fit schemas and end; none for schemas without any."""
        if key not in self._shapes:
            self._shapes.update(self._work_out(key))
        return self._shapes[key]

    def _work_out(self, root: Key) -> dict[Key, tuple[Shape, ...]]:
        """Return the shapes of all schemas that one leads to."""
        found: dict[Key, tuple[Shape, ...]] = {}
        queue = [root]
        for key in queue:
            if key in found or key == ANY:
                continue
            found[key] = self._cases.shapes(key)
            queue += [part for shape in found[key] for part in _parts(shape)]
        ending = {ANY}
        while True:
            more = {
                key
                for key, shapes in found.items()
                if key not in ending and any(_needs(shape) <= ending for shape in shapes)
            }
            if not more:
                break
            ending |= more
        return {
            key: tuple(
                pruned
                for shape in shapes
                if _needs(shape) <= ending and (pruned := _pruned(shape, ending)) is not None
            )
            for key, shapes in found.items()
        } | {ANY: ()}


def nothing_fits() -> SchemaError:
    """Return the error of a schema without values."""
    return SchemaError("no value fits the schema", path="")


def _parts(shape: Shape) -> list[Key]:
    if isinstance(shape, Array):
        return [*shape.prefix, shape.rest]
    if isinstance(shape, Object):
        return [x.value for x in shape.entries] + [x.value for x in shape.extras]
    return []


def _needs(shape: Shape) -> set[Key]:
    """Return the schemas of parts that are always there."""
    if isinstance(shape, Array):
        least = shape.length.least
        rest = {shape.rest} if least > len(shape.prefix) else set()
        return {*shape.prefix[:least]} | rest
    if isinstance(shape, Object):
        return {entry.value for entry in shape.entries if entry.required}
    return set()


def _pruned(shape: Shape, ending: set[Key]) -> Shape | None:
    """Return a shape without parts that never end."""
    if isinstance(shape, Array):
        keys = (*shape.prefix, shape.rest)
        length = shape.length
        for index, key in enumerate(keys):
            if key not in ending:
                length = length.meet(Length(0, index))
                break
        if length.is_empty:
            return None
        return replace(shape, prefix=shape.prefix[: length.most], length=length)
    if isinstance(shape, Object):
        return replace(
            shape,
            entries=tuple(x for x in shape.entries if x.value in ending),
            extras=tuple(x for x in shape.extras if x.value in ending),
        )
    return shape
