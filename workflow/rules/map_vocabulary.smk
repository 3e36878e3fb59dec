"""map_vocabulary: the tokens that the draft may propose.

REQUIRED INPUTS: results/NAME/target.json, results/NAME/tokenize/{rows.parquet,tokenize.json}
OUTPUTS: results/NAME/vocabulary/vocabulary.{safetensors,json}
"""


rule map_vocabulary:
    """Count the supervised tokens and keep the most frequent ones."""
    input:
        target=RESULTS / "target.json",
        rows=RESULTS / "tokenize/rows.parquet",
        tokenize=RESULTS / "tokenize/tokenize.json",
        initial_draft=PLAN.initial_draft_files,
    output:
        vocabulary=RESULTS / "vocabulary/vocabulary.safetensors",
        report=RESULTS / "vocabulary/vocabulary.json",
    log:
        LOGS / "map_vocabulary.log",
    benchmark:
        BENCHMARKS / "map_vocabulary.tsv"
    conda:
        "../../envs/draftsmith.yaml"
    params:
        settings=PLAN.settings("map_vocabulary"),
    resources:
        mem_mb=8000,
        runtime=30,
    shell:
        "python -m draftsmith map-vocabulary --settings {params.settings:q}"
        " --target {input.target:q} --rows {input.rows:q}"
        " --tokenize-report {input.tokenize:q} --vocabulary {output.vocabulary:q} --report {output.report:q}"
        " 3>&2 > {log:q} 2>&1"
