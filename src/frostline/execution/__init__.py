"""Running stages on samples: what freezing, auditing and live runs share, so that their bits agree."""

from frostline.execution.block import Execution as Execution
from frostline.execution.block import whole_chunks as whole_chunks
from frostline.execution.call import Ready as Ready
from frostline.execution.early import Block as Block
from frostline.execution.early import Early as Early
from frostline.execution.early import together as together
