"""The store: what is computed once, on disk. The format is specified in README.md beside this file."""

from frostline.store.field import Field as Field
from frostline.store.reader import Store as Store
from frostline.store.table import Table as Table
