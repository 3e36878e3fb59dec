"""merge_manifest: one manifest for all shards.

REQUIRED INPUTS: results/NAME/extract/shards/*.json, results/NAME/tokenize/rows.parquet
OUTPUTS: results/NAME/extract/manifest.json
"""


rule merge_manifest:
    """Join the shards' manifests and make sure that every row is there exactly once."""
    input:
        rows=RESULTS / "tokenize/rows.parquet",
        shards=gather.extract(str(RESULTS / "extract/shards/{scatteritem}.json")),
    output:
        manifest=RESULTS / "extract/manifest.json",
    log:
        LOGS / "merge_manifest.log",
    benchmark:
        BENCHMARKS / "merge_manifest.tsv"
    conda:
        "../../envs/draftsmith.yaml"
    resources:
        mem_mb=8000,
        runtime=30,
    shell:
        "python -m draftsmith merge-manifest --rows {input.rows:q} --manifest {output.manifest:q} {input.shards:q}"
        " 3>&2 > {log:q} 2>&1"
