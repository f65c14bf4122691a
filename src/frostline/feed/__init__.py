"""The feed: batches of a store, on the device, in an order that can be resumed."""

from frostline.feed.feed import Feed as Feed
