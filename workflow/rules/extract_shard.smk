"""extract_shard: hidden states by vLLM. A shard is one model load, a batch is one file of the store.

REQUIRED INPUTS: results/NAME/target.json, results/NAME/tokenize/rows.parquet, results/NAME/dry_run.json, so that it runs late
OUTPUTS: results/NAME/extract/shards/{scatteritem}.json
The batch files are no outputs: Snakemake deletes the outputs of a failed job, and finished batches must stay.
"""


rule extract_shard:
    """Run the target over the rows that the store lacks and keep what its layers say of every token."""
    input:
        target=RESULTS / "target.json",
        rows=RESULTS / "tokenize/rows.parquet",
        # Not ancient(): where an ancient input is made anew, Snakemake no longer looks at the job's own params.
        dry_run=RESULTS / "dry_run.json",
    output:
        manifest=RESULTS / "extract/shards/{scatteritem}.json",
    log:
        LOGS / "extract_shard/{scatteritem}.log",
    benchmark:
        BENCHMARKS / "extract_shard/{scatteritem}.tsv"
    conda:
        "../../envs/draftsmith.yaml"
    params:
        settings=PLAN.settings("extract_shard"),
    threads: ENGINE_THREADS
    resources:
        gpu=GPUS,
        mem_mb=lambda wildcards, attempt: 200000 if GPUS > 1 else 32000,
        runtime=lambda wildcards, attempt: 720 * attempt,
    shell:
        "python -m draftsmith extract-shard --settings {params.settings:q}"
        " --gpus {resources.gpu}"
        " --target {input.target:q} --rows {input.rows:q} --scatteritem {wildcards.scatteritem}"
        " --manifest {output.manifest:q}"
        " 3>&2 > {log:q} 2>&1"
