"""What every rule shares: the checked config, names of folders, and how settings reach a stage."""

import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

# A clone works without the package being installed, at least as far as a dry run goes.
sys.path.insert(0, str(Path(workflow.current_basedir).parent))

from draftsmith.errors import DraftsmithError
from draftsmith.workflow import Plan

try:
    PLAN = Plan.of(config, workflow.configfiles)
except DraftsmithError as error:
    # One sentence and an exit code, instead of the stack of the parser.
    print(f"draftsmith: {error}", file=sys.stderr)
    sys.exit(1)

RESULTS = Path("results") / PLAN.config.name
LOGS = Path("logs") / PLAN.config.name
BENCHMARKS = Path("benchmarks/rules") / PLAN.config.name
WORK = Path("work") / PLAN.config.name

# How the engine runs changes no result. As a global and not a param, it re-runs nothing when it is changed.
ENGINE = PLAN.engine
GPUS = PLAN.gpus
# Descriptor 3 is the terminal: a stage shows its own lines there, while everything else goes to the log.
RUN = "DRAFTSMITH_CONSOLE=3 draftsmith"


scattergather:
    extract=1,


wildcard_constraints:
    scatteritem=r"\d+-of-\d+",


localrules:
    all,
