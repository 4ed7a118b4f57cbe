"""The training terms as modules that keep their options: `Group(weight=0.1)(model, x, y)`."""

from collections.abc import Callable
from typing import Any, ClassVar, final

from torch import nn

from likewise.losses.density import density
from likewise.losses.functional import along, group, orbit, pair, two_batches


class Term(nn.Module):
    """A training term with options; called with a model and what the function of that name takes."""

    function: ClassVar[Callable[..., Any]]

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, model: nn.Module, *given: Any, **more: Any) -> Any:
        """Return the term."""
        return type(self).function(model, *given, **self.options, **more)

    def extra_repr(self) -> str:
        """Return the options."""
        return ", ".join(
            f"{name}={getattr(value, '__name__', value)}" for name, value in self.options.items()
        )


@final
class Pair(Term):
    """`losses.pair` with its options kept."""

    function = staticmethod(pair)


@final
class Group(Term):
    """`losses.group` with its options kept."""

    function = staticmethod(group)


@final
class Orbit(Term):
    """`losses.orbit` with its options kept."""

    function = staticmethod(orbit)


@final
class TwoBatches(Term):
    """`losses.two_batches` with its options kept."""

    function = staticmethod(two_batches)


@final
class Along(Term):
    """`losses.along` with its options kept."""

    function = staticmethod(along)


@final
class Density(Term):
    """`losses.density` with its options kept."""

    function = staticmethod(density)
