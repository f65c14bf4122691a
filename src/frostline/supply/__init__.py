"""Batches for a training step: frozen fields from a store or from the source, then what runs every epoch."""

from frostline.supply.batches import Supply as Supply
from frostline.supply.entry import supply as supply
