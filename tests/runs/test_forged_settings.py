"""A ledger that somebody rewrote, hashes and all, is refused in words or read."""

from __future__ import annotations

from typing import Any

import pytest

from fpfl.runs.resume import _adapting, _promised


@pytest.mark.parametrize("given", [True, None, 3, "x", [1], {}, {"adapts": False}])
def test_settings_of_any_kind_are_read(given: Any) -> None:
    settings = {"clip": given, "privacy": given}
    assert _adapting(settings) is None
    assert _promised(settings)["convention"] is None
