"""The list of long variants names tests that exist."""

import pytest

from tests._support.long_variants import LONG_VARIANTS
from tests._support.paths import ROOT


@pytest.mark.parametrize("name", sorted(LONG_VARIANTS))
def test_long_variant_is_a_test(name):
    file, _, function = name.partition("::")
    assert f"def {function.partition('[')[0]}(" in (ROOT / "tests" / file).read_text()
