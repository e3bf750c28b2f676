"""Has pip install this checkout as it is, and nothing else (docs/decisions/0034-the-checkout-is-the-product.md)."""

from typing import NoReturn

from setuptools.build_meta import build_editable, get_requires_for_build_editable, prepare_metadata_for_build_editable

__all__ = ["build_editable", "get_requires_for_build_editable", "prepare_metadata_for_build_editable"]


def build_wheel(*_: object, **__: object) -> NoReturn:
    """Refuse."""
    raise SystemExit(
        "Trackbed is not made into a wheel: a deploy needs the checkout's files. Run `make control` in the checkout."
    )


build_sdist = build_wheel
