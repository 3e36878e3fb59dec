"""dry_run: what only shows when the engine runs is found with few layers of dummy weights, in about two minutes.

REQUIRED INPUTS: results/NAME/target.json, results/NAME/tokenize/rows.parquet, results/NAME/clean_gpus.json, as it needs free GPUs
OUTPUTS: results/NAME/dry_run.json; it says 'skipped' where no dry run is wanted (config: preflight.dry_run)
"""


rule dry_run:
    """Take four rows through the whole extraction into a store that is thrown away, with the engine's own arguments."""
    input:
        target=RESULTS / "target.json",
        rows=RESULTS / "tokenize/rows.parquet",
        clean=RESULTS / "clean_gpus.json",
    output:
        report=RESULTS / "dry_run.json",
    log:
        LOGS / "dry_run.log",
    benchmark:
        BENCHMARKS / "dry_run.tsv"
    conda:
        "../../envs/draftsmith.yaml"
    params:
        settings=PLAN.settings("dry_run"),
    threads: 32
    resources:
        gpu=GPUS,
        mem_mb=lambda wildcards, attempt: 200000 if GPUS > 1 else 32000,
        runtime=lambda wildcards, attempt: 45 * attempt,
    shell:
        "python -m draftsmith dry-run --settings {params.settings:q}"
        " --gpus {resources.gpu}"
        " --target {input.target:q} --rows {input.rows:q}"
        " --report {output.report:q}"
        " 3>&2 > {log:q} 2>&1"
