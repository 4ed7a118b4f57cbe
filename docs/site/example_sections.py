"""A Griffe extension: the section `Example:` of a docstring is rendered as code, as `Examples:` is."""

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Give the section the name under which Griffe parses it."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rename the section in the docstring of any object."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
