# Draftsmith: from conversations and a target LLM to a trained, exported, served and measured EAGLE-3 draft.
#
#   snakemake --profile local                                      this machine, the embedded demo
#   snakemake --profile slurm --configfile config/kimi-k2.5.yaml   a Slurm cluster, a 1T MoE
#
# A box of the DAG, its rule, the file in workflow/rules/, the command `draftsmith` and the Python module share one name.


# The demo. Another config stands on its own: whatever it does not name is the model's default, not the demo's value.
if not workflow.overwrite_configfiles:

    configfile: "config/config.yaml"


include: "workflow/rules/common.smk"
include: "workflow/rules/get_target.smk"
include: "workflow/rules/regenerate.smk"
include: "workflow/rules/merge_answers.smk"
include: "workflow/rules/tokenize.smk"
include: "workflow/rules/preflight.smk"
include: "workflow/rules/clean_gpus.smk"
include: "workflow/rules/dry_run.smk"
include: "workflow/rules/extract_shard.smk"
include: "workflow/rules/merge_manifest.smk"
include: "workflow/rules/map_vocabulary.smk"
include: "workflow/rules/look.smk"
include: "workflow/rules/train_draft.smk"
include: "workflow/rules/export_draft.smk"
include: "workflow/rules/evaluate_draft.smk"
include: "workflow/rules/report.smk"
include: "workflow/rules/gate.smk"


rule all:
    """The served draft's acceptance length, and the page about the whole run."""
    input:
        RESULTS / "evaluate/evaluate.json",
        RESULTS / "report.html",
        RESULTS / "gate.json",
    default_target: True
