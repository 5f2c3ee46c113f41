"""What the live comparisons share."""

import jax
import pytest


def pytest_ignore_collect(config):
    """Plain `pytest` leaves these tests out, and need not wait for PyTorch to be imported to see that."""
    return True if "not parity" in config.option.markexpr else None


@pytest.fixture(autouse=True, scope="module")
def highest_precision():
    with jax.default_matmul_precision("highest"):
        yield
