"""From schemas that a value fits to the shapes that it may have.

The conditions of a set of schemas are taken apart into cases, each a list of atoms that all hold,
and each case is merged into a shape. What a schema says of parts of a value stays a set of schemas,
taken apart when somebody asks: recursive schemas are finite that way.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from jaxserve.errors import SchemaError
from jaxserve.guided import conditions as c
from jaxserve.guided.conditions import And, Atom, Formula, Literal, Or, TypeName
from jaxserve.guided.document import Document
from jaxserve.guided.keywords import asserts_nothing, schema_formula
from jaxserve.guided.merging import merge_array, merge_scalar
from jaxserve.guided.properties import merge_object, options_of
from jaxserve.guided.shapes import Key, Shape

MAX_CASES = 2_000
MAX_NODES = 20_000


class Cases:
    """The shapes of sets of schemas of one document, each worked out once.

    What is written keeps to the properties that schemas list. What fits is another question, and
    decides where a schema must not fit: `exact` cases answer that one.
    """

    def __init__(self, document: Document, *, exact: bool = False) -> None:
        self._document = document
        self._is_exact = exact
        self.exact: Cases = self if exact else Cases(document, exact=True)
        self._shapes: dict[tuple[Key, TypeName], tuple[Shape, ...]] = {}
        self._under_way: set[tuple[Key, TypeName]] = set()

    def shapes(self, key: Key) -> tuple[Shape, ...]:
        """Return all shapes that a value may have.

        Raises:
            SchemaError: a keyword is wrong or cannot be enforced, or there are too many cases.
        """
        return tuple(shape for kind in c.TYPES for shape in self.of_type(key, kind))

    def of_type(self, key: Key, kind: TypeName) -> tuple[Shape, ...]:
        """Return the shapes of one type."""
        place = (key, kind)
        known = self._shapes.get(place)
        if known is None:
            if len(self._shapes) > MAX_NODES:
                raise SchemaError("the schema has too many combinations", code="schema_too_complex")
            self._under_way.add(place)
            try:
                known = tuple(dict.fromkeys(self._merged(key, kind)))
            finally:
                self._under_way.discard(place)
            self._shapes[place] = known
        return known

    def is_empty(self, key: Key) -> bool:
        """Whether no value fits; False where that would need to know itself."""
        return all(self.is_empty_of(key, kind) for kind in c.TYPES)

    def is_empty_of(self, key: Key, kind: TypeName) -> bool:
        """Whether no value of a type fits; False where that would need to know itself."""
        return (key, kind) not in self._under_way and not self.of_type(key, kind)

    def key(self, *literals: Literal) -> Key:
        """Return a set of schemas, less those that ask for nothing."""
        return frozenset(
            literal
            for literal in map(self._followed, literals)
            if not (literal.positive and asserts_nothing(self._document.at(literal.pointer)))
        )

    def _followed(self, literal: Literal) -> Literal:
        """Return the schema that a schema of nothing but a reference means."""
        seen = set()
        while literal not in seen:
            seen.add(literal)
            schema = self._document.at(literal.pointer)
            if not (isinstance(schema, dict) and isinstance(schema.get("$ref"), str)):
                break
            if not asserts_nothing({name: 0 for name in schema if name != "$ref"}):
                break
            target = self._document.resolve(literal.pointer, schema["$ref"])
            literal = Literal(target, literal.positive)
        return literal

    def _merged(self, key: Key, kind: TypeName) -> Iterator[Shape]:
        first = sorted(key, key=lambda literal: (not literal.positive, literal.pointer))
        scope = first[0].pointer if len(first) == 1 else None
        branches = _Branches(self, self._document, kind, scope, exact=self._is_exact)
        found = list(branches.shapes(_Branch(list(reversed(first)))))
        # A property that only a `not` asks for is written where there is no other way.
        if any(not foreign for _, foreign in found):
            found = [(shape, foreign) for shape, foreign in found if not foreign]
        for shape, _ in found:
            yield shape


@dataclass(slots=True)
class _Branch:
    """A case in the making."""

    pending: list[Formula]
    atoms: dict[Atom, None] = field(default_factory=dict)
    choices: list[Or] = field(default_factory=list)
    seen: dict[Literal, None] = field(default_factory=dict)
    negative: list[Literal] = field(default_factory=list)

    def fork(self, option: Formula) -> "_Branch":
        """Return a copy that goes on with one option."""
        return _Branch(
            [option],
            dict(self.atoms),
            list(self.choices),
            dict(self.seen),
            list(self.negative),
        )


class _Branches:
    """Takes conditions apart, depth first."""

    def __init__(
        self,
        cases: Cases,
        document: Document,
        kind: TypeName,
        scope: str | None = None,
        *,
        exact: bool,
    ) -> None:
        self._cases = cases
        self._document = document
        self._kind: TypeName = kind
        self._scope = scope
        self._is_exact = exact
        self._count = 0

    def shapes(self, first: "_Branch") -> Iterator[tuple[Shape, bool]]:
        """Return the shape of each case that a branch comes to.

        And whether it has a property that is there only because another schema must not fit.
        """
        for atoms in self._cases_of(first):
            if self._is_exact:
                # Formats are annotations to some, and without `unevaluatedProperties` more fits
                # than does: what is empty without either is empty.
                ignored = (c.Unevaluated, c.Declares, c.HasFormat)
                atoms = [atom for atom in atoms if not isinstance(atom, ignored)]
            foreign = False
            if self._kind == "object":
                merged, foreign = merge_object(self._cases, atoms, scope=self._scope)
            elif self._kind == "array":
                merged = merge_array(self._cases, atoms)
            else:
                merged = merge_scalar(self._kind, atoms)
            if merged is not None:
                yield merged, foreign

    def _cases_of(self, first: "_Branch") -> Iterator[list[Atom]]:
        stack = [first]
        while stack:
            branch = stack.pop()
            self._count += 1
            if self._count > MAX_CASES:
                pointer = next(iter(branch.seen)).pointer
                raise SchemaError(
                    f"{pointer or 'the schema'}: its alternatives make more than {MAX_CASES} cases",
                    path=pointer,
                    code="schema_too_complex",
                )
            if not self._take_apart(branch):
                continue
            options = self._next_choice(branch)
            if options is None:
                yield list(branch.atoms)
            else:
                stack += [branch.fork(option) for option in reversed(options)]

    def _next_choice(self, branch: _Branch) -> tuple[Formula, ...] | None:
        """Return the options of what is to be decided next; None where all is decided."""
        if branch.choices:
            branch.choices.sort(key=lambda choice: len(choice.parts))
            return branch.choices.pop(0).parts
        while branch.negative:
            literal = branch.negative.pop(0)
            if not self._excluded_anyway(branch, literal):
                return (schema_formula(self._document, literal.pointer, self._kind).contrary(),)
        for atom in branch.atoms:
            options = options_of(self._cases, atom, list(branch.atoms))
            if options is not None:
                del branch.atoms[atom]
                return options
        return None

    def _excluded_anyway(self, branch: _Branch, literal: Literal) -> bool:
        """Whether what the value fits already leaves nothing that would fit a schema.

        Then that it does not fit says nothing new: most alternatives of `oneOf` are of this kind.
        """
        # What the value fits is known in atoms; `seen` keeps it from being followed again.
        fitting = {x: None for x in branch.seen if x.positive}
        together = _Branch([literal.contrary()], dict(branch.atoms), seen=fitting)
        exact = _Branches(self._cases.exact, self._document, self._kind, exact=True)
        try:
            return next(exact.shapes(together), None) is None
        except SchemaError:
            # It cannot be told. A keyword that is wrong is met again, where it is followed.
            return False

    def _take_apart(self, branch: _Branch) -> bool:
        """Follow all that is not a choice; False where it cannot hold."""
        while branch.pending:
            part = branch.pending.pop()
            if isinstance(part, And):
                branch.pending += reversed(part.parts)
            elif isinstance(part, Or):
                if not part.parts:
                    return False
                if len(part.parts) == 1:
                    branch.pending.append(part.parts[0])
                else:
                    branch.choices.append(part)
            elif isinstance(part, Literal):
                if not self._follow(branch, part):
                    return False
            else:
                branch.atoms[part] = None
        return True

    def _follow(self, branch: _Branch, literal: Literal) -> bool:
        if literal in branch.seen:
            return True
        if Literal(literal.pointer, not literal.positive) in branch.seen:
            return False
        branch.seen[literal] = None
        if literal.positive:
            branch.pending.append(schema_formula(self._document, literal.pointer, self._kind))
        else:
            branch.negative.append(literal)
        return True
