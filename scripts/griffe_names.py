"""For the API reference: each of several parameters that share a description keeps its own type.

Where a docstring describes ``learning_rate, optimizer`` together, griffe gives both the type and
the default of the first. The signature knows better.
"""

from __future__ import annotations

from typing import Any

import griffe


class OwnTypes(griffe.Extension):
    """Take types and defaults of described parameters from the signature, one by one."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Go through all of a package when it is loaded."""
        _walk(pkg)


def _walk(found: griffe.Object) -> None:
    for member in found.members.values():
        if not member.is_alias and isinstance(member, griffe.Object):
            _own_types(member)
            _walk(member)


def _own_types(found: griffe.Object) -> None:
    if found.docstring is None or not isinstance(found, griffe.Function | griffe.Class):
        return
    for section in found.docstring.parsed:
        if not isinstance(section, griffe.DocstringSectionParameters):
            continue
        for described in section.value:
            if described.name in found.parameters:
                own = found.parameters[described.name]
                described.annotation, described.value = own.annotation, own.default
