"""What every rule shares: the checked config, names of folders, and how settings reach a stage."""

import os
import shlex
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

# A clone works without the package being installed.
PACKAGE = Path(workflow.current_basedir).parent
sys.path.insert(0, str(PACKAGE))

from draftsmith import idle_gpus, partitions
from draftsmith.processes import run_mark
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

GPUS = PLAN.gpus
# So that as many engines as a machine has GPUs for run side by side; on a CPU one takes what is there.
ENGINE_THREADS = min(32, 8 * GPUS) if GPUS else 32

# A job's Python is Snakemake's own, even where that was called by its path; a conda environment still goes before it.
PYTHON_FOLDER = str(Path(sys.executable).parent)
if os.environ.get("PATH", "").split(os.pathsep)[0] != PYTHON_FOLDER:
    os.environ.update(PATH=os.pathsep.join([PYTHON_FOLDER, os.environ.get("PATH", os.defpath)]))

# What a job is told outside of its params, as a change of it must re-run nothing: that descriptor 3 is the terminal, where a
# stage shows its own lines while all else goes to its log; by which mark a process of a Snakemake that is gone is known;
# where `draftsmith status` looks for signs of life; and where the package lies. Braces are doubled for Snakemake's formatting.
shell.prefix(
    (
        f"set -euo pipefail; unset {run_mark.MARK} {run_mark.LEASED};"
        f" export DRAFTSMITH_CONSOLE=3 {run_mark.WORKFLOW}={run_mark.own()}"
        f" DRAFTSMITH_PROGRESS={shlex.quote(str(LOGS / 'progress'))}"
        f" PYTHONPATH={shlex.quote(str(PACKAGE))}${{PYTHONPATH:+:$PYTHONPATH}}; "
    )
    .replace("{", "{{")
    .replace("}", "}}")
)

# And the whole config, of which a stage takes only what changes no result (how the engine runs, what preflight and cleaning
# may do) and the report shows all. Not in the prefix, which Snakemake prints whole when a job fails; a job of a cluster comes
# here again, on its node.
os.environ.update(DRAFTSMITH_CONFIG=PLAN.whole)

PARTITIONS = partitions.told(
    workflow.resource_settings.default_resources,
    workflow.resource_settings.overwrite_resources,
    os.environ,
)
# Not once more in each job.
if PARTITIONS and workflow.is_main_process:
    print(PARTITIONS, file=sys.stderr)
elif workflow.is_main_process:
    OFFERED = workflow.global_resources.get("gpu")
    TRAINED_ON = workflow.resource_settings.overwrite_resources.get("train_draft", {}).get("gpu")
    EXTRACTED, TRAINED = (RESULTS / name for name in ("extract/manifest.json", "train/train.json"))
    IDLE = idle_gpus.told(
        OFFERED.value if OFFERED else 0,
        GPUS,
        None if EXTRACTED.exists() else workflow.resource_settings.overwrite_scatter.get("extract", 1),
        None if TRAINED.exists() else TRAINED_ON.value if TRAINED_ON else GPUS,
    )
    if IDLE:
        print(IDLE, file=sys.stderr)


scattergather:
    regenerate=1,
    extract=1,


wildcard_constraints:
    scatteritem=r"\d+-of-\d+",


localrules:
    all,
