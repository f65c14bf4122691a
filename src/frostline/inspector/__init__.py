"""What is frozen, by looking: `fl.audit` runs stages and a training step and says what is not as declared."""

from frostline.inspector.entry import audit as audit
from frostline.inspector.report import AuditReport as AuditReport
from frostline.inspector.report import StageAudit as StageAudit
from frostline.inspector.report import TrainingAudit as TrainingAudit
