"""What a frozen backbone said: the token store, its batches, and the sources and backbones that fill it."""

from cswe.tokens.batches import Batches, plan_batches
from cswe.tokens.errors import BadItemError, ForeignShardError, TokenStoreError
from cswe.tokens.gather import Batch
from cswe.tokens.labels import Labels, LabelSpec
from cswe.tokens.manifest import Manifest, StoreSpec
from cswe.tokens.statistics import TokenStatistics
from cswe.tokens.store import TokenStore, drop_damaged
from cswe.tokens.writer import Item, StoreWriter

__all__ = [
    "BadItemError",
    "Batch",
    "Batches",
    "ForeignShardError",
    "Item",
    "LabelSpec",
    "Labels",
    "Manifest",
    "StoreSpec",
    "StoreWriter",
    "TokenStatistics",
    "TokenStore",
    "TokenStoreError",
    "drop_damaged",
    "plan_batches",
]
