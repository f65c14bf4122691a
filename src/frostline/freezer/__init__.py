"""Frozen stages into a store: computed once, resumed anywhere, brought up to date when something changes."""

from frostline.freezer.run import freeze as freeze
from frostline.freezer.wrapped import cached as cached
