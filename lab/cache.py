"""The folder where built things are kept: images, programs, package repositories. It is outside the repository."""

from fleet.paths import cache as home

__all__ = ["home"]
